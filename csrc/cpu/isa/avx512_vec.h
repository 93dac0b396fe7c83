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
#include "../kernels/one_quad.h"

// The vector of both AVX-512 tables; kHasBf16Dot says whether vdpbf16ps may be used.
namespace {

struct Avx512Int {  // sixteen lanes of 32 bits, or of four bytes
  __m512i v;

  static Avx512Int set(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static Avx512Int load(const void* p) { return {_mm512_loadu_si512(p)}; }
};

inline Avx512Int operator&(Avx512Int a, Avx512Int b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Avx512Int operator|(Avx512Int a, Avx512Int b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int kBits>
inline Avx512Int shift_left(Avx512Int a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
template <int kBits>
inline Avx512Int shift_right(Avx512Int a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}

inline __m512 add_lanes(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
inline __m512i add_lanes(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
inline __m512 as_floats(__m512 a) { return a; }
inline __m512 as_floats(__m512i a) { return _mm512_castsi512_ps(a); }
template <class Bits>  // of __m512 or __m512i
inline Bits from_floats(__m512 a) {
  return a;
}
template <>
inline __m512i from_floats<__m512i>(__m512 a) {
  return _mm512_castps_si512(a);
}
// Lane i: the sum of the lanes of x[i], i < 16, floats or integers.
template <class Lanes>
inline Lanes sum_each_lane(const Lanes* x) {
  using Bits = decltype(x->v);
  const auto add = [](__m512 a, __m512 b) {
    return as_floats(add_lanes(from_floats<Bits>(a), from_floats<Bits>(b)));
  };
  // [a lower + a upper half, b lower + b upper half].
  const auto fold_halves = [&](Lanes a, Lanes b) {
    const __m512 first = as_floats(a.v), second = as_floats(b.v);
    return add(_mm512_mask_blend_ps(0xff00, first, second),
               _mm512_shuffle_f32x4(first, second, 0x4e));
  };
  // In each quad: [a0 + a2, b0 + b2, a1 + a3, b1 + b3].
  const auto fold_pairs = [&](__m512 a, __m512 b) {
    return add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  __m512 quads[4];
  for (int k = 0; k < 4; ++k) {
    const __m512 a = fold_halves(x[k], x[k + 4]), b = fold_halves(x[k + 8], x[k + 12]);
    quads[k] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const __m512 low = fold_pairs(quads[0], quads[1]), high = fold_pairs(quads[2], quads[3]);
  return {from_floats<Bits>(
      add(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee)))};
}
inline Avx512Int sum_each(const Avx512Int* x) { return sum_each_lane(x); }

// The sum of 16 bytes.
inline int32_t sum_of_16(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i above = _mm_xor_si128(bytes, _mm_set1_epi8(-128));  // + 128: unsigned
  const __m128i halves = _mm_sad_epu8(above, _mm_setzero_si128());
  return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 128;
}

template <bool kHasBf16Dot>
struct Avx512Vec {
  using Int = Avx512Int;
  static constexpr bool kHasLookup = true;
  static constexpr int64_t kLanes = 16;
  static constexpr bool kBf16Dot = kHasBf16Dot;
  __m512 v;

  // 16 pairs of 16-bit words (bf16, or integers), one a 32-bit lane, the first in its low half.
  struct Pairs {
    __m512i v;
    static Pairs load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
    static Pairs widen(const int8_t* p) { return {_mm512_cvtepi8_epi16(load_256(p))}; }
    static Pairs set(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
    void store(uint32_t* p) const { _mm512_storeu_si512(p, v); }
  };

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
  // 64 bytes, of which the first `bytes` from p and zeros after them; reads nothing beyond.
  static void copy_bytes(const void* p, int64_t bytes, void* lanes) {
    const __mmask64 mask = bytes >= 64 ? ~uint64_t{0} : (uint64_t{1} << bytes) - 1;
    _mm512_storeu_si512(lanes, _mm512_maskz_loadu_epi8(mask, p));
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
  void store_i8(int8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }
  void store_i16(int16_t* p) const { store_256(p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v))); }

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
  // x - floor(x), 0 for infinities; 2^floor(x) = times_power_of_two(1, n).
  friend Avx512Vec fraction(Avx512Vec x, Avx512Vec& n) {
    n = x;
    return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  }
  // p * 2^floor(n), gradual at both ends.
  friend Avx512Vec times_power_of_two(Avx512Vec p, Avx512Vec n) {
    return {_mm512_scalef_ps(p.v, n.v)};
  }
  friend Avx512Vec copy_sign(Avx512Vec magnitude, Avx512Vec sign) {
    const __m512 sign_bit = _mm512_and_ps(sign.v, _mm512_set1_ps(-0.0f));
    return {_mm512_or_ps(abs(magnitude).v, sign_bit)};
  }
  friend Avx512Vec select_less(Avx512Vec a, Avx512Vec b, Avx512Vec then, Avx512Vec otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), otherwise.v, then.v)};
  }
  // Lane i: then where bit i is set.
  friend Avx512Vec select_bits(uint32_t bits, Avx512Vec then, Avx512Vec otherwise) {
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), otherwise.v, then.v)};
  }
  // Lane i: the sum of the lanes of x[i], i < 16.
  friend Avx512Vec sum_each(const Avx512Vec* x) { return sum_each_lane(x); }
  // Part i of x, kLanes / kParts lanes, at p + i * stride.
  template <int kParts>
  friend void store_parts(Avx512Vec x, float* p, int64_t stride) {
    if constexpr (kParts == 2) {
      _mm256_storeu_ps(p, _mm512_castps512_ps256(x.v));
      _mm256_storeu_ps(p + stride, _mm512_extractf32x8_ps(x.v, 1));
    } else {
      static_assert(kParts == 4);
      _mm_storeu_ps(p, _mm512_castps512_ps128(x.v));
      _mm_storeu_ps(p + stride, _mm512_extractf32x4_ps(x.v, 1));
      _mm_storeu_ps(p + 2 * stride, _mm512_extractf32x4_ps(x.v, 2));
      _mm_storeu_ps(p + 3 * stride, _mm512_extractf32x4_ps(x.v, 3));
    }
  }
  // Lane j of x[i] becomes lane i of x[j], i and j < 16.
  friend void transpose_lanes(Avx512Vec* x) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 4) {  // 4 x 4 blocks of one quad
      const __m512 a = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
      const __m512 b = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
      const __m512 c = _mm512_unpacklo_ps(x[i + 2].v, x[i + 3].v);
      const __m512 d = _mm512_unpackhi_ps(x[i + 2].v, x[i + 3].v);
      t[i] = _mm512_shuffle_ps(a, c, 0x44);
      t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
      t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
      t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    for (int k = 0; k < 4; ++k) {  // quad q of t[k + 4 * row] to quad row of x[k + 4 * q]
      const __m512 a = _mm512_shuffle_f32x4(t[k], t[k + 4], 0x88);
      const __m512 b = _mm512_shuffle_f32x4(t[k], t[k + 4], 0xdd);
      const __m512 c = _mm512_shuffle_f32x4(t[k + 8], t[k + 12], 0x88);
      const __m512 d = _mm512_shuffle_f32x4(t[k + 8], t[k + 12], 0xdd);
      x[k].v = _mm512_shuffle_f32x4(a, c, 0x88);
      x[k + 4].v = _mm512_shuffle_f32x4(b, d, 0x88);
      x[k + 8].v = _mm512_shuffle_f32x4(a, c, 0xdd);
      x[k + 12].v = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
  }
  // The even and the odd elements of a, b taken as one row; and back.
  friend void deinterleave(Avx512Vec a, Avx512Vec b, Avx512Vec& even, Avx512Vec& odd) {
    const __m512i at = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even.v = _mm512_permutex2var_ps(a.v, at, b.v);
    odd.v = _mm512_permutex2var_ps(a.v, _mm512_add_epi32(at, _mm512_set1_epi32(1)), b.v);
  }
  friend void interleave(Avx512Vec even, Avx512Vec odd, Avx512Vec& a, Avx512Vec& b) {
    const __m512i at = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    a.v = _mm512_permutex2var_ps(even.v, at, odd.v);
    b.v = _mm512_permutex2var_ps(even.v, _mm512_add_epi32(at, _mm512_set1_epi32(8)), odd.v);
  }
  // Lane i: table[index of lane i mod 16].
  friend Avx512Vec lookup(Avx512Vec table, Avx512Int index) {
    return {_mm512_permutexvar_ps(index.v, table.v)};
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
