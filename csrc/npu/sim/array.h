#pragma once
#include <span>

#include "../kernel_list.h"
#include "../machine.h"
#include "../program.h"
#include "statistics.h"

namespace fasttps::npu::sim {

struct RunOptions {
  bool functional = true;  // false: time alone, no data and no kernels' results
  Numerics numerics;
  // Awaits of the sequence that are ignored, by their moves' names: what breaks without them?
  std::vector<std::string> ignored_awaits;
  std::vector<TraceEvent>* trace = nullptr;
};

// One call of a program on an array: data and time together.
//   arguments  the device's view of each, of the program's sizes; empty spans if not functional
// Throws Deadlock; std::out_of_range for a move past its argument.
Statistics run_on_array(const Program& program, const Machine& machine,
                        std::span<const std::span<std::byte>> arguments,
                        std::span<const int64_t> scalars, const RunOptions& options);

}  // namespace fasttps::npu::sim
