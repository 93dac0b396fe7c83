#include "team.h"

#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace fasttps::cpu {
namespace {

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::string contents(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The tightest quota from this process's control group up to the root of what it sees.
int64_t cgroup_cpus(int64_t none) {
  const std::string self = contents("/proc/self/cgroup");
  std::string path;
  std::istringstream lines(self);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("0::", 0) == 0) path = line.substr(3);
  }
  int64_t cpus = none;
  while (true) {
    const std::string text = contents("/sys/fs/cgroup" + path + "/cpu.max");
    cpus = std::min(cpus, parse_cpu_max(text.c_str(), none));
    if (path.empty() || path == "/") return cpus;
    path.erase(path.rfind('/'));
  }
}

}  // namespace

int64_t parse_cpu_max(const char* text, int64_t none) {
  long long quota = 0, period = 0;
  if (std::sscanf(text, "%lld %lld", &quota, &period) != 2 || quota <= 0 || period <= 0) {
    return none;
  }
  return std::max<int64_t>(1, quota / period);
}

int64_t usable_cpus() {
  int64_t cpus = std::max(1u, std::thread::hardware_concurrency());
#ifdef __linux__
  static const int64_t quota = cgroup_cpus(int64_t{1} << 20);
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) cpus = CPU_COUNT(&mask);
  cpus = std::min(cpus, quota);
#endif
  return cpus;
}

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
  for (int i = 0; i < spins_; ++i) {
    if (phase_.load(std::memory_order_acquire) != phase) return;
    pause_core();
  }
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
