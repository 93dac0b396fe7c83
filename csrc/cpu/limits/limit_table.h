#pragma once
#include <cstdint>

// What the ruler runs to learn what this machine can do at most: loops that only read, and loops
// that only multiply. One table per instruction set; torch-free.
namespace fasttps::cpu {

// The XOR of all 8-byte words of [data, data + bytes), read as `streams` contiguous parts side by
// side; prefetch_bytes ahead of each, if not 0. bytes is a multiple of 64, data 64-byte aligned.
using ReadLoop = uint64_t (*)(const void* data, int64_t bytes, int64_t prefetch_bytes);

enum class PrefetchHint : int { kNone = 0, kAllLevels = 1, kNonTemporal = 2 };
inline constexpr int kPrefetchHints = 3;
inline constexpr int kReadStreams[] = {1, 2, 4, 8};
inline constexpr int kReadStreamCounts = 4;

// A loop of one arithmetic instruction on independent accumulators, more than its latency needs.
struct PeakLoop {
  const char* instruction;
  uint32_t required_features;        // CpuFeature bits
  int64_t operations_per_iteration;  // multiplications and additions
  uint64_t (*run)(int64_t iterations);
};
inline constexpr int kMaxPeakLoops = 4;

struct LimitTable {
  const char* isa;
  uint32_t required_features;
  ReadLoop read[kReadStreamCounts][kPrefetchHints];  // all null, or none
  PeakLoop peaks[kMaxPeakLoops];                     // ends before the first without a name
};

extern const LimitTable kScalarLimits;
#ifdef FASTTPS_X86
extern const LimitTable kAvx2Limits;
extern const LimitTable kAvx512Limits;
extern const LimitTable kAvx512Bf16Limits;
extern const LimitTable kAvx512Fp16Limits;
#endif

}  // namespace fasttps::cpu
