#include <immintrin.h>

#include <cstdint>

#include "../../kernel_table.h"
#include "../loops.h"

namespace fasttps::cpu {
namespace {

inline uint64_t fold_256(__m256i a) {
  return static_cast<uint64_t>(_mm256_extract_epi64(a, 0) ^ _mm256_extract_epi64(a, 1) ^
                               _mm256_extract_epi64(a, 2) ^ _mm256_extract_epi64(a, 3));
}

struct Word {
  static constexpr int64_t kBytes = 32;
  __m256i v;
  static Word zero() { return {_mm256_setzero_si256()}; }
  static Word load(const uint8_t* p) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(p))};
  }
  friend Word operator^(Word a, Word b) { return {_mm256_xor_si256(a.v, b.v)}; }
  friend uint64_t fold(Word a) { return fold_256(a.v); }
};

struct FmaChain {
  using Register = __m256;
  static constexpr int64_t kOperations = 16;
  static Register start() { return _mm256_set1_ps(1.0f); }
  static Register factor() { return _mm256_set1_ps(0.5f); }
  static void step(Register& acc, Register x) {
    asm volatile("vfmadd231ps %1, %1, %0" : "+v"(acc) : "v"(x));
  }
  static uint64_t fold_bits(Register acc) { return fold_256(_mm256_castps_si256(acc)); }
};

}  // namespace

const LimitTable kAvx2Limits = {"avx2",
                                kAvx2Bit | kFmaBit,
                                FASTTPS_READ_LOOPS(Word),
                                {peak<FmaChain, 12>("vfmadd231ps ymm", kAvx2Bit | kFmaBit)}};

}  // namespace fasttps::cpu
