#include "avx512_vec.h"

namespace {
using Vec = Avx512Vec<false>;

inline Vec to_float(Avx512Int a) { return {_mm512_cvtepi32_ps(a.v)}; }
// sum + the products of unsigned bytes of u with signed bytes of s. Even and odd bytes are widened
// first: vpmaddubsw would saturate where two products leave 16 bits.
inline Avx512Int dot_bytes(Avx512Int sum, Avx512Int u, Avx512Int s) {
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(u.v, _mm512_set1_epi16(0xff)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(s.v, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u.v, 8), _mm512_srai_epi16(s.v, 8));
  return {_mm512_add_epi32(_mm512_add_epi32(sum.v, even), odd)};
}
// The same for u below 64, where vpmaddubsw is exact.
inline Avx512Int dot_small_bytes(Avx512Int sum, Avx512Int u, Avx512Int s) {
  const __m512i pairs = _mm512_maddubs_epi16(u.v, s.v);
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
}  // namespace

#include "../kernels/all.h"

namespace fasttps::cpu {
const KernelTable kAvx512Kernels =
    kernel_table_for<Vec>("avx512", kAvx2Bit | kFmaBit | kF16cBit | kAvx512fBit | kAvx512bwBit |
                                        kAvx512dqBit | kAvx512vlBit);
}  // namespace fasttps::cpu
