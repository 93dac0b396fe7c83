#pragma once
#include <string>
#include <vector>

#include "npu/machine.h"
#include "npu/program.h"

// A small valid program, and a machine that it fits.
namespace fasttps::npu::testing {

constexpr int64_t kHalfBytes = 256;  // that one core has of an element
constexpr int64_t kWholeBytes = 2 * kHalfBytes;

inline Machine small_machine() {
  Machine machine{};
  machine.name = "small";
  machine.columns = machine.shim_columns = 2;
  machine.core_rows = 2;
  machine.core.memory_bytes = 16384;
  machine.mem_tile.memory_bytes = 65536;
  machine.mem_tile.dimensions = machine.shim.dimensions = 4;
  machine.core.dimensions = 3;
  for (TileSpec* spec :
       {static_cast<TileSpec*>(&machine.core), static_cast<TileSpec*>(&machine.shim)}) {
    spec->channels_in = spec->channels_out = 2;
    spec->buffer_descriptors = spec->locks = 16;
  }
  machine.mem_tile.channels_in = machine.mem_tile.channels_out = 6;
  machine.mem_tile.buffer_descriptors = 48;
  machine.mem_tile.locks = 64;
  machine.shim.queue_depth = 4;
  return machine;
}

inline Statement acquire(int fifo, Port port, int acquired, int count = 1) {
  return {Acquire{.fifo = fifo, .port = port, .count = count, .acquired = acquired}};
}
inline Statement release(int fifo, Port port, int count = 1) {
  return {Release{.fifo = fifo, .port = port, .count = count}};
}
inline Statement copy(KernelArgument from, KernelArgument to, Expression bytes) {
  return {Call{"copy", {std::move(from), std::move(to), std::move(bytes)}}};
}

// L3 -> shim -> mem tile -> a half to each of two cores -> mem tile -> shim -> L3, all in column 0.
// The token's slot in the output is a scalar of the call.
enum SmallFifo { kIn, kIn0, kIn1, kOut0, kOut1, kOut };
inline Program small_program() {
  const Tile shim{0, 0}, mem{0, 1};
  Program program;
  program.name = "halves";
  program.scalars = {"position"};
  program.arguments = {{"x", 4 * kWholeBytes, Access::kIn}, {"y", 1 << 16, Access::kOut}};
  program.fifos = {
      {.name = "in",
       .element_bytes = kWholeBytes,
       .producer = {.tile = shim, .depth = 0},
       .consumers = {{.tile = mem}}},
      {.name = "in_0",
       .element_bytes = kHalfBytes,
       .producer = {.tile = mem, .walk = {{8, 8}, {8, 1}}},
       .consumers = {{.tile = {0, 2}}}},
      {.name = "in_1",
       .element_bytes = kHalfBytes,
       .producer = {.tile = mem, .walk = {{8, 1}, {8, 8}}},
       .consumers = {{.tile = {0, 3}}}},
      {.name = "out_0",
       .element_bytes = kHalfBytes,
       .producer = {.tile = {0, 2}},
       .consumers = {{.tile = mem}}},
      {.name = "out_1",
       .element_bytes = kHalfBytes,
       .producer = {.tile = {0, 3}},
       .consumers = {{.tile = mem}}},
      {.name = "out",
       .element_bytes = kWholeBytes,
       .producer = {.tile = mem},
       .consumers = {{.tile = shim, .depth = 0}}},
  };
  program.links = {
      {.tile = mem, .inputs = {kIn}, .outputs = {kIn0, kIn1}, .offsets_bytes = {0, kHalfBytes}},
      {.tile = mem, .inputs = {kOut0, kOut1}, .outputs = {kOut}, .offsets_bytes = {0, kHalfBytes}}};
  for (const int core : {0, 1}) {
    const int in = kIn0 + core, out = kOut0 + core;
    const Body body{acquire(in, Port::kConsume, 0),
                    acquire(out, Port::kProduce, 1),
                    copy(Held{0}, OfScratch{0}, kHalfBytes),
                    copy(OfScratch{0}, Held{1}, kHalfBytes),
                    release(in, Port::kConsume),
                    release(out, Port::kProduce)};
    program.cores.push_back(
        {.tile = {0, 2 + core},
         .scratch = {{"kept", kHalfBytes}},
         .body = {{Loop{
             .index = 0, .count = 4, .body = {{If{min(Expression::index(0) + 1, 1), body}}}}}}});
  }
  program.sequence = {
      Move{.name = "x", .argument = 0, .fifo = kIn, .walk = {{4 * kWholeBytes / 4, 1}}},
      Move{.name = "y",
           .argument = 1,
           .fifo = kOut,
           .offset = Expression::scalar(0) * (kWholeBytes / 4),
           .walk = {{4, kWholeBytes / 4}, {kWholeBytes / 4, 1}}},
      Await{"y"}};
  return program;
}

}  // namespace fasttps::npu::testing
