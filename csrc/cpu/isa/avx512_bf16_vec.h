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
// acc + the sum of the two products of each pair of 16-bit integers. Of the intrinsic gcc 12 copies
// accumulators before every use, and spills some of sixteen.
inline Avx512Int dot_words(Avx512Int acc, Vec::Pairs a, Vec::Pairs b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "vm"(b.v));
  return acc;
}
// Words 0-3, 8-11, 16-19 and 24-27 of a beside those of b, one pair a lane; and words 4-7, ...
inline void pair_words(Vec::Pairs a, Vec::Pairs b, Vec::Pairs& low, Vec::Pairs& high) {
  low.v = _mm512_unpacklo_epi16(a.v, b.v);
  high.v = _mm512_unpackhi_epi16(a.v, b.v);
}
// The two halves of the 32 elements whose order pair_words changed.
inline void restore_order(Vec low, Vec high, Vec& first, Vec& second) {
  const __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  first.v = _mm512_permutex2var_ps(low.v, at, high.v);
  second.v = _mm512_permutex2var_ps(low.v, _mm512_add_epi32(at, _mm512_set1_epi32(8)), high.v);
}
}  // namespace
