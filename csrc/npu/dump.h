#pragma once
#include <string>

#include "machine.h"
#include "program.h"

// Programs for people to read. Indices into a program's lists must be valid.
namespace fasttps::npu {

// Top to bottom: arguments, FIFOs with their ends, links, the bodies of cores, the sequence.
//   in_0   256 bytes  (0, 1) x 2, walk 8 x 8, 8 x 1 of 4 bytes -> (0, 2) x 2
// An end is a tile and a depth; a walk is size x stride, outermost first.
std::string dump(const Program& program);

// What the program takes of each tile, beside what the machine has; the last line counts the ports
// of mem tiles as paper 002 does.
std::string dump_uses(const Program& program, const Machine& machine);

// SVG: the array with row 0 at the bottom, cores coloured by their kernels, FIFOs as arrows.
std::string picture(const Program& program, const Machine& machine);

}  // namespace fasttps::npu
