#pragma once
#include "avx512_vec.h"

// The vector of the tables with vdpbf16ps.
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

inline Vec dot_pairs(Vec acc, Vec::Pairs a, Vec::Pairs b) {
  return {
      _mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}
// Pair i: lane i of `first` and of `second`, rounded; subnormals become zero.
inline Vec::Pairs bf16_pairs(Vec first, Vec second) {
  const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i from = _mm512_or_si512(_mm512_slli_epi32(lane, 16), lane);  // first's, twice
  return {_mm512_permutexvar_epi16(_mm512_add_epi32(from, _mm512_set1_epi32(16 << 16)), both)};
}
// The same of lanes that are bf16.
inline Vec::Pairs exact_bf16_pairs(Vec first, Vec second) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first.v), 16);
  return {_mm512_or_si512(low, _mm512_castps_si512(second.v))};
}
}  // namespace
