#pragma once
#include <vector>

#include "machine.h"
#include "program.h"

namespace fasttps::npu {

// What a program takes of a tile, of what a machine has at most.
struct TileUse {
  Tile tile;
  int64_t channels_in = 0;   // stream to memory
  int64_t channels_out = 0;  // memory to stream
  // Those of the channels whose other end is a core: what paper 002 counts at mem tiles as ports,
  // whichever way they go.
  int64_t core_ports = 0;
  int64_t bytes = 0;  // elements, scratch and stack
  int64_t buffer_descriptors = 0;
  int64_t locks = 0;
};

// Of every tile that it uses, in order. The program's FIFOs and links must fit together.
//   A core's pool of elements has two locks, full and free, and a descriptor for each element where
//   a DMA serves it. A descriptor takes one lock, so the pool of a link has two locks for each part
//   of its elements, and as many descriptors where the whole comes or goes.
//   A shim's descriptors are its moves', which are made anew as they are done.
std::vector<TileUse> tile_uses(const Program& program);

// Throws Incompatible at the first limit of the machine that a program breaks, and
// std::invalid_argument where its parts do not fit together; each names tile or part, what was
// wanted and what came. What only a call's scalars decide is not looked at.
void validate(const Program& program, const Machine& machine);

}  // namespace fasttps::npu
