#include "ruler.h"

#include <omp.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>

#include "../isa_list.h"
#include "../kernel_table.h"

namespace fasttps::cpu {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kHugePage = int64_t{2} << 20;

std::vector<const LimitTable*> runnable_tables() {
  static const LimitTable* const tables[] = {
#ifdef FASTTPS_X86
      &kAvx512Fp16Limits, &kAvx512Bf16Limits, &kAvx512Limits, &kAvx2Limits,
#endif
      &kScalarLimits,
  };
  std::vector<const LimitTable*> runnable;
  for (const LimitTable* table : tables) {
    if ((table->required_features & ~cpu_features()) == 0) runnable.push_back(table);
  }
  return runnable;
}

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

void check(bool good, const std::string& what) {
  if (!good) throw std::invalid_argument("limits: " + what);
}

void check_threads(int threads) {
  check(threads >= 1, "threads must be at least 1, got " + std::to_string(threads));
}

int stream_index(int streams) {
  for (int i = 0; i < kReadStreamCounts; ++i) {
    if (kReadStreams[i] == streams) return i;
  }
  throw std::invalid_argument("limits: streams must be 1, 2, 4 or 8, got " +
                              std::to_string(streams));
}

int hint_index(const std::string& hint) {
  const char* const names[kPrefetchHints] = {"none", "all_levels", "non_temporal"};
  for (int i = 0; i < kPrefetchHints; ++i) {
    if (hint == names[i]) return i;
  }
  throw std::invalid_argument("limits: hint must be none, all_levels or non_temporal, got '" +
                              hint + "'");
}

void pause() {
#ifdef FASTTPS_X86
  __builtin_ia32_pause();
#endif
}

}  // namespace

ReadBuffer::ReadBuffer(int64_t bytes, int threads, bool huge_pages)
    : bytes_(bytes), threads_(threads) {
  check(bytes > 0 && bytes % kLine == 0,
        "bytes must be a positive multiple of 64, got " + std::to_string(bytes));
  check_threads(threads);
  // Room to begin at a huge page's border.
  mapped_bytes_ = bytes + kHugePage;
  void* mapped =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  madvise(mapped, mapped_bytes_, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  data_ = static_cast<uint8_t*>(mapped);
#pragma omp parallel num_threads(threads)
  for (int t = omp_get_thread_num(); t < threads_; t += omp_get_num_threads()) {
    auto* const first = reinterpret_cast<uint64_t*>(part(0));
    auto* const end = reinterpret_cast<uint64_t*>(part(t + 1));
    for (auto* word = reinterpret_cast<uint64_t*>(part(t)); word < end; ++word) {
      *word = static_cast<uint64_t>(word - first);
    }
  }
}

ReadBuffer::~ReadBuffer() { munmap(data_, mapped_bytes_); }

uint8_t* ReadBuffer::part(int thread) const {
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data_)) % kHugePage;
  const int64_t lines = bytes_ / kLine;
  return data_ + (kHugePage - misaligned) % kHugePage + lines * thread / threads_ * kLine;
}

uint64_t ReadBuffer::read(const std::string& isa, int streams, const std::string& hint,
                          int64_t prefetch_bytes, int64_t sweeps) const {
  check(sweeps >= 1, "sweeps must be at least 1, got " + std::to_string(sweeps));
  const int stream = stream_index(streams), ahead = hint_index(hint);
  ReadLoop loop = nullptr;
  for (const LimitTable* table : runnable_tables()) {
    if (isa == table->isa) loop = table->read[stream][ahead];
  }
  check(loop != nullptr, "no read loop of this CPU is of isa '" + isa + "'");
  uint64_t folded = 0;
#pragma omp parallel num_threads(threads_) reduction(^ : folded)
  for (int t = omp_get_thread_num(); t < threads_; t += omp_get_num_threads()) {
    const uint8_t* begin = part(t);
    uint64_t sum = 0;
    for (int64_t i = 0; i < sweeps; ++i) sum = loop(begin, part(t + 1) - begin, prefetch_bytes);
    folded ^= sum;
  }
  return folded;
}

std::vector<std::string> read_isas() {
  std::vector<std::string> names;
  for (const LimitTable* table : runnable_tables()) {
    if (table->read[0][0] != nullptr) names.emplace_back(table->isa);
  }
  return names;
}

std::vector<PeakInstruction> peak_instructions() {
  std::vector<PeakInstruction> found;
  for (const LimitTable* table : runnable_tables()) {
    for (const PeakLoop& peak : table->peaks) {
      if (peak.instruction != nullptr) found.push_back({table->isa, peak.instruction});
    }
  }
  return found;
}

double peak_operations_per_s(const std::string& instruction, int threads, double seconds) {
  check_threads(threads);
  const PeakLoop* found = nullptr;
  for (const LimitTable* table : runnable_tables()) {
    for (const PeakLoop& peak : table->peaks) {
      if (peak.instruction != nullptr && instruction == peak.instruction) found = &peak;
    }
  }
  check(found != nullptr, "no loop of this CPU has the instruction '" + instruction + "'");
  constexpr int64_t kIterations = 1 << 12;
  std::atomic<uint64_t> sink{0};
  double rate = 0;
#pragma omp parallel num_threads(threads) reduction(+ : rate)
  {
    uint64_t folded = found->run(kIterations);  // the clock settles
    int64_t done = 0;
#pragma omp barrier
    const double begin = now();
    double elapsed = 0;
    do {
      folded ^= found->run(kIterations);
      done += kIterations;
      elapsed = now() - begin;
    } while (elapsed < seconds);
    rate += static_cast<double>(done * found->operations_per_iteration) / elapsed;
    sink ^= folded;
  }
  return rate;
}

double region_seconds(int threads, int64_t regions) {
  check_threads(threads);
  check(regions >= 1, "regions must be at least 1, got " + std::to_string(regions));
  std::atomic<int64_t> ran{0};
  const auto region = [&] {
#pragma omp parallel num_threads(threads)
    if (omp_get_thread_num() == 0) ran.store(ran.load() + 1);
  };
  region();
  const double begin = now();
  for (int64_t i = 0; i < regions; ++i) region();
  return (now() - begin) / static_cast<double>(regions);
}

// Counts arrivals; the last to come opens the next turn.
double barrier_seconds(int threads, int64_t barriers) {
  check_threads(threads);
  check(barriers >= 1, "barriers must be at least 1, got " + std::to_string(barriers));
  alignas(kLine) std::atomic<int64_t> arrived{0};
  alignas(kLine) std::atomic<int64_t> turn{0};
  double elapsed = 0;
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads();
    const auto wait = [&](int64_t mine) {
      if (arrived.fetch_add(1) + 1 == team) {
        arrived.store(0);
        turn.store(mine + 1);
      } else {
        while (turn.load() == mine) pause();
      }
    };
    wait(0);
    const double begin = now();
    for (int64_t i = 1; i <= barriers; ++i) wait(i);
    if (omp_get_thread_num() == 0) elapsed = now() - begin;
  }
  return elapsed / static_cast<double>(barriers);
}

}  // namespace fasttps::cpu
