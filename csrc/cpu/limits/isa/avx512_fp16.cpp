#include "avx512_words.h"

namespace fasttps::cpu {
namespace {

struct FmaF16Chain {
  using Register = __m512h;
  static constexpr int64_t kOperations = 64;
  static Register start() { return _mm512_set1_ph(static_cast<_Float16>(1.0f)); }
  static Register factor() { return _mm512_set1_ph(static_cast<_Float16>(0.5f)); }
  static void step(Register& acc, Register x) {
    asm volatile("vfmadd231ph %1, %1, %0" : "+v"(acc) : "v"(x));
  }
  static uint64_t fold_bits(Register acc) { return fold_512(_mm512_castph_si512(acc)); }
};

}  // namespace

const LimitTable kAvx512Fp16Limits = {"avx512_fp16",
                                      kAvx512fBit | kAvx512Fp16Bit,
                                      {},
                                      {peak<FmaF16Chain, 24>("vfmadd231ph zmm", kAvx512Fp16Bit)}};

}  // namespace fasttps::cpu
