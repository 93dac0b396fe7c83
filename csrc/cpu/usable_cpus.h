#pragma once
#include <cstdint>

// How many threads can run at once. Torch-free.
namespace fasttps::cpu {

// CPUs that the calling thread may use at once: its affinity mask, cut to the CPU quota of its
// control group. Threads that spin beyond this number take time from those that work.
int64_t usable_cpus();

// The CPU quota of a cpu.max file (cgroup v2: "<quota> <period>", microseconds) in whole CPUs,
// rounded down, at least 1; `none` where it states no limit or makes no sense.
int64_t parse_cpu_max(const char* text, int64_t none);

}  // namespace fasttps::cpu
