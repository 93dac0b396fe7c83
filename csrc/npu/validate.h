#pragma once
#include "machine.h"
#include "program.h"

namespace fasttps::npu {

// What a program takes of a tile.
struct TileUse {
  Tile tile;
  int64_t bytes = 0;
  int64_t channels_in = 0;   // stream to memory
  int64_t channels_out = 0;  // memory to stream
  int64_t buffer_descriptors = 0;
  int64_t locks = 0;
};

// Of every tile that it uses, in order. The program's FIFOs and links must fit together.
//   Elements at a tile: depth x bytes, a buffer descriptor each where a DMA serves them, and two
//   locks. FIFOs that a link joins share the elements of the larger one; each has its channel and
//   its descriptors.
std::vector<TileUse> tile_uses(const Program& program);

// Throws Incompatible at the first limit of the machine that a program breaks, and
// std::invalid_argument where its parts do not fit together; each names tile or part, what was
// wanted and what came. What only a call's scalars decide is not looked at.
void validate(const Program& program, const Machine& machine);

}  // namespace fasttps::npu
