#include "avx512_words.h"

namespace fasttps::cpu {
namespace {

struct FmaChain {
  using Register = __m512;
  static constexpr int64_t kOperations = 32;
  static Register start() { return _mm512_set1_ps(1.0f); }
  static Register factor() { return _mm512_set1_ps(0.5f); }
  static void step(Register& acc, Register x) {
    asm volatile("vfmadd231ps %1, %1, %0" : "+v"(acc) : "v"(x));
  }
  static uint64_t fold_bits(Register acc) { return fold_512(_mm512_castps_si512(acc)); }
};

}  // namespace

const LimitTable kAvx512Limits = {"avx512",
                                  kAvx512fBit,
                                  FASTTPS_READ_LOOPS(Word),
                                  {peak<FmaChain, 24>("vfmadd231ps zmm", kAvx512fBit)}};

}  // namespace fasttps::cpu
