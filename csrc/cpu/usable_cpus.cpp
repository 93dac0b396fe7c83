#include "usable_cpus.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace fasttps::cpu {
namespace {

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
  char* end = nullptr;
  const long long quota = std::strtoll(text, &end, 10);  // 0 of "max"
  const long long period = std::strtoll(end, nullptr, 10);
  if (quota <= 0 || period <= 0) return none;
  return std::max<int64_t>(1, quota / period);
}

int64_t usable_cpus() {
  // Both read files, which takes longer than a region of threads may last.
  static const int64_t all = std::max(1u, std::thread::hardware_concurrency());
#ifdef __linux__
  static const int64_t quota = cgroup_cpus(int64_t{1} << 20);
  cpu_set_t mask;
  const bool known = sched_getaffinity(0, sizeof mask, &mask) == 0;
  return std::min<int64_t>(known ? CPU_COUNT(&mask) : all, quota);
#else
  return all;
#endif
}

}  // namespace fasttps::cpu
