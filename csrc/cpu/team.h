#pragma once
#include <atomic>
#include <cstdint>
#include <functional>

// Several threads of torch's OpenMP pool that work through phases within one parallel region.
// A region costs tens of microseconds where the pool sleeps between two of them; a barrier within
// one costs a fraction of a microsecond.
namespace fasttps::cpu {

class Team;

// One thread of a team.
struct TeamMember {
  int64_t index;  // 0 ... size - 1
  int64_t size;
  Team& team;

  // Returns once every member has called it as often as this one; what they wrote is visible.
  void wait() const;

  // This member's part of [0, count): contiguous, the parts differ by at most one.
  int64_t begin(int64_t count) const { return count * index / size; }
  int64_t end(int64_t count) const { return count * (index + 1) / size; }
};

class Team {
 public:
  Team(int64_t size, bool may_spin) : size_(size), spins_(may_spin ? kSpins : 0) {}
  void wait();

 private:
  // Long enough for the slowest phase of a token, short enough that a thread that was taken off
  // its core costs the others little.
  static constexpr int kSpins = 20000;

  const int64_t size_;
  const int spins_;
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// Calls run(member) once on each of at most `threads` threads of torch's pool; one where the caller
// is in a parallel region already. run must not throw.
void run_team(int64_t threads, const std::function<void(const TeamMember&)>& run);

// CPUs that the calling thread may use at once: its affinity mask, cut to the CPU quota of its
// control group. Threads that spin beyond this number take time from those that work.
int64_t usable_cpus();

// The CPU quota of a cpu.max file (cgroup v2: "<quota> <period>", microseconds) in whole CPUs,
// rounded down, at least 1; `none` where it states no limit or makes no sense.
int64_t parse_cpu_max(const char* text, int64_t none);

}  // namespace fasttps::cpu
