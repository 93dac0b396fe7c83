#pragma once
#include <cmath>
#include <memory>
#include <optional>

#include "array.h"
#include "pool.h"
#include "shared_pipe.h"
#include "walk.h"

// The parts of one run: what a program's FIFOs, links and cores become, and the coroutines that
// move and compute. array.cpp makes them.
namespace fasttps::npu::sim {

// A move of the sequence with its numbers patched in. What it writes to L3 is on its way until it
// is awaited, or a later one of its channel is: nobody sees it before.
struct PatchedMove {
  std::string name;
  int fifo;
  KnownWalk walk;
  int argument;
  std::unique_ptr<Gate> done;
  std::vector<std::byte> written;
};

// The moves of one shim channel, in order.
struct MoveQueue {
  std::deque<PatchedMove*> moves;
  std::unique_ptr<Semaphore> waiting;  // moves
  std::unique_ptr<Semaphore> places;   // of the channel's queue
};

// One side of a DMA's way: a pool, as its producer or consumer number `side`, or L3.
struct WayEnd {
  Pool* pool = nullptr;
  int side = 0;
  int row = 0;                    // of the tile: which level it is
  int64_t part_offset = 0;        // of the FIFO's bytes in an element of the pool
  std::optional<KnownWalk> walk;  // through those bytes
};

// A FIFO that a DMA serves, from one end to one or several others.
struct Way {
  const Fifo* fifo = nullptr;
  WayEnd from;
  std::vector<WayEnd> to;
  MoveQueue queue;     // where one end is L3
  int64_t repeat = 1;  // of each element
  FifoStatistics* statistics = nullptr;
};

// What all coroutines of a run share.
struct Run {
  const Program& program;
  const Machine& machine;
  std::span<const std::span<std::byte>> arguments;
  std::span<const int64_t> scalars;
  const RunOptions& options;
  Simulation simulation;
  SharedPipe dram;
  Statistics statistics;

  Run(const Program& program, const Machine& machine,
      std::span<const std::span<std::byte>> arguments, std::span<const int64_t> scalars,
      const RunOptions& options);

  double cycle_ps() const { return 1e6 / machine.clock_mhz; }
  double stream_bytes_per_ps() const {
    return static_cast<double>(machine.stream_bytes_per_cycle) / cycle_ps();
  }
  Picoseconds cycles(int64_t count) const {
    return std::llround(static_cast<double>(count) * cycle_ps());
  }
  void trace(const std::string& track, const std::string& name, Picoseconds begin);
};

Process serve_way(Run& run, Way& way);

// A core's pools by FIFO and port, and its body.
struct CoreSide {
  Pool* pool = nullptr;
  int side = 0;
};
struct CoreRun {
  const Core* core = nullptr;
  std::vector<CoreSide> produces;  // by FIFO
  std::vector<CoreSide> consumes;
  std::vector<std::vector<std::byte>> scratch;
  CoreStatistics* statistics = nullptr;
};
Process run_core(Run& run, CoreRun& core);

}  // namespace fasttps::npu::sim
