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
  Team(int64_t size, bool may_spin) : may_spin_(may_spin), size_(size) {}
  void wait();

 private:
  // What is written while others wait has a cache line of its own.
  alignas(64) std::atomic<uint32_t> phase_{0};
  const bool may_spin_;
  const int64_t size_;
  alignas(64) std::atomic<int64_t> arrived_{0};
};

// Calls run(member) once on each of at most `threads` threads of torch's pool; one where the caller
// is in a parallel region already. run must not throw.
void run_team(int64_t threads, const std::function<void(const TeamMember&)>& run);

}  // namespace fasttps::cpu
