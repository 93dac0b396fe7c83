#include "avx512_vec.h"

namespace {
using Vec = Avx512Vec<true>;

// acc + odd products + even products of 16 pairs of bf16. Subnormals count as zero.
inline Vec dot_bf16_pairs(Vec acc, Avx512Int weights, Avx512Int activations) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(weights.v),
                           reinterpret_cast<__m512bh>(activations.v))};
}

inline Vec to_float(Avx512Int a) { return {_mm512_cvtepi32_ps(a.v)}; }
// sum + the products of unsigned bytes of u with signed bytes of s.
inline Avx512Int dot_bytes(Avx512Int sum, Avx512Int u, Avx512Int s) {
  return {_mm512_dpbusd_epi32(sum.v, u.v, s.v)};
}
inline Avx512Int dot_small_bytes(Avx512Int sum, Avx512Int u, Avx512Int s) {
  return dot_bytes(sum, u, s);
}
}  // namespace

#include "../kernels/all.h"

namespace fasttps::cpu {
const KernelTable kAvx512Bf16Kernels = kernel_table_for<Vec>(
    "avx512_bf16", kAvx2Bit | kFmaBit | kF16cBit | kAvx512fBit | kAvx512bwBit | kAvx512dqBit |
                       kAvx512vlBit | kAvx512Bf16Bit | kAvx512VnniBit);
}  // namespace fasttps::cpu
