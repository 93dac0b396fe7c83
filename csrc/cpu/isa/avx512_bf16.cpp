#include "avx512_vec.h"

namespace {
using Vec = Avx512Vec<true>;

// acc + odd products + even products of 16 pairs of bf16. Subnormals count as zero.
inline Vec dot_bf16_pairs(Vec acc, const uint16_t* weights, uint32_t activation_pair) {
  const __m512i a = _mm512_set1_epi32(static_cast<int>(activation_pair));
  const __m512i w = _mm512_loadu_si512(weights);
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(a))};
}
}  // namespace

#include "../kernels/all.h"

namespace fasttps::cpu {
const KernelTable kAvx512Bf16Kernels = kernel_table_for<Vec>(
    "avx512_bf16", kAvx2Bit | kFmaBit | kF16cBit | kAvx512fBit | kAvx512bwBit | kAvx512dqBit |
                       kAvx512vlBit | kAvx512Bf16Bit | kAvx512VnniBit);
}  // namespace fasttps::cpu
