#include "team.h"

#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <optional>

#include "usable_cpus.h"

namespace fasttps::cpu {
namespace {

// How long a thread spins before it sleeps, in pauses: long enough for the slowest phase of a token
// where every thread has a core of its own. Where other programs keep the cores busy, the thread
// that is waited for may be off its core for milliseconds, and spinning takes time from it: so the
// limit falls by half with each wait that ended in sleep, and grows again with those that did not.
constexpr int kMostSpins = 20000, kLeastSpins = 100;
std::atomic<int> spin_limit{kMostSpins};

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void TeamMember::wait() const { team.wait(); }

void Team::wait() {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
    return;
  }
  const int limit = may_spin_ ? spin_limit.load(std::memory_order_relaxed) : 0;
  for (int i = 0; i < limit; ++i) {
    if (phase_.load(std::memory_order_acquire) != phase) {
      if (limit < kMostSpins) {
        spin_limit.store(std::min(kMostSpins, limit + limit / 16 + 1), std::memory_order_relaxed);
      }
      return;
    }
    pause_core();
  }
  if (may_spin_) spin_limit.store(std::max(kLeastSpins, limit / 2), std::memory_order_relaxed);
  phase_.wait(phase, std::memory_order_acquire);
}

void run_team(int64_t threads, const std::function<void(const TeamMember&)>& run) {
  threads = at::in_parallel_region() || omp_in_parallel() ? 1 : std::max<int64_t>(1, threads);
  if (threads == 1) {
    Team team(1, false);
    run({0, 1, team});
    return;
  }
  // The runtime may give fewer threads than asked for, so the team is sized inside the region.
  const bool may_spin = threads <= usable_cpus();
  std::optional<Team> team;
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
#pragma omp single
    team.emplace(omp_get_num_threads(), may_spin);
    // `single` ends in a barrier, so every thread sees the team.
    run({omp_get_thread_num(), omp_get_num_threads(), *team});
  }
}

}  // namespace fasttps::cpu
