#include "avx512_words.h"

namespace fasttps::cpu {
namespace {

struct DotBf16Chain {
  using Register = __m512;
  static constexpr int64_t kOperations = 64;  // two products and two sums a lane
  static Register start() { return _mm512_set1_ps(1.0f); }
  static Register factor() { return _mm512_castsi512_ps(_mm512_set1_epi32(0x3f003f00)); }
  static void step(Register& acc, Register x) {
    asm volatile("vdpbf16ps %1, %1, %0" : "+v"(acc) : "v"(x));
  }
  static uint64_t fold_bits(Register acc) { return fold_512(_mm512_castps_si512(acc)); }
};

struct DotInt8Chain {
  using Register = __m512i;
  static constexpr int64_t kOperations = 128;  // four products and four sums a lane
  static Register start() { return _mm512_setzero_si512(); }
  static Register factor() { return _mm512_set1_epi32(0x01010101); }
  static void step(Register& acc, Register x) {
    asm volatile("vpdpbusd %1, %1, %0" : "+v"(acc) : "v"(x));
  }
  static uint64_t fold_bits(Register acc) { return fold_512(acc); }
};

}  // namespace

const LimitTable kAvx512Bf16Limits = {"avx512_bf16",
                                      kAvx512fBit | kAvx512Bf16Bit | kAvx512VnniBit,
                                      {},
                                      {peak<DotBf16Chain, 24>("vdpbf16ps zmm", kAvx512Bf16Bit),
                                       peak<DotInt8Chain, 24>("vpdpbusd zmm", kAvx512VnniBit)}};

}  // namespace fasttps::cpu
