#pragma once
// gcc 12 takes the undefined value inside its own AVX-512 intrinsics for a use (gcc bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

#include "../kernel_table.h"
#include "../kernels/half.h"

// The vector of both AVX-512 tables; kHasBf16Dot says whether vdpbf16ps may be used.
namespace {

template <bool kHasBf16Dot>
struct Avx512Vec {
  static constexpr int64_t kLanes = 16;
  static constexpr bool kBf16Dot = kHasBf16Dot;
  __m512 v;

  static Avx512Vec set(float x) { return {_mm512_set1_ps(x)}; }
  static Avx512Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Avx512Vec load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(load_256(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Avx512Vec load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(load_256(p))}; }
  static Avx512Vec load_i8(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
  }
  static void load_bf16_pairs(const uint16_t* p, Avx512Vec& even, Avx512Vec& odd) {
    const __m512i pairs = _mm512_loadu_si512(p);
    even.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    odd.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
  }
  static void load_f16_pairs(const uint16_t* p, Avx512Vec& even, Avx512Vec& odd) {
    const __m512i pairs = _mm512_loadu_si512(p);
    even.v = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
    odd.v = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  // vcvtneps2bf16 would flush subnormals, so the rounding is done on the bits.
  void store_bf16(uint16_t* p) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i lsb = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i result = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
    store_256(p, _mm512_cvtepi32_epi16(result));
  }
  void store_f16(uint16_t* p) const {
    store_256(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  friend Avx512Vec operator+(Avx512Vec a, Avx512Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Avx512Vec operator-(Avx512Vec a, Avx512Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Avx512Vec operator*(Avx512Vec a, Avx512Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Avx512Vec operator/(Avx512Vec a, Avx512Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
  friend Avx512Vec operator-(Avx512Vec a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
  friend Avx512Vec fmadd(Avx512Vec a, Avx512Vec b, Avx512Vec c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
  }
  friend Avx512Vec min(Avx512Vec a, Avx512Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
  friend Avx512Vec max(Avx512Vec a, Avx512Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  friend Avx512Vec abs(Avx512Vec a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)}; }
  friend Avx512Vec rint(Avx512Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  friend Avx512Vec power_of_two(Avx512Vec n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
  }
  friend Avx512Vec copy_sign(Avx512Vec magnitude, Avx512Vec sign) {
    const __m512 sign_bit = _mm512_and_ps(sign.v, _mm512_set1_ps(-0.0f));
    return {_mm512_or_ps(abs(magnitude).v, sign_bit)};
  }
  friend Avx512Vec select_less(Avx512Vec a, Avx512Vec b, Avx512Vec then, Avx512Vec otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), otherwise.v, then.v)};
  }
  friend float reduce_add(Avx512Vec a) { return _mm512_reduce_add_ps(a.v); }
  friend float reduce_max(Avx512Vec a) { return _mm512_reduce_max_ps(a.v); }

 private:
  static __m256i load_256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static void store_256(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
};

}  // namespace
