#include <immintrin.h>

#include <cstdint>

#include "../kernel_table.h"
#include "../kernels/half.h"
#include "../kernels/one_quad.h"

namespace {

struct Int {  // eight lanes of 32 bits, or of four bytes
  __m256i v;

  static Int set(int32_t x) { return {_mm256_set1_epi32(x)}; }
  static Int load(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
};

struct Vec {
  using Int = ::Int;
  static constexpr bool kHasLookup = false;
  static constexpr int64_t kLanes = 8;
  static constexpr bool kBf16Dot = false;
  __m256 v;

  static Vec set(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load_bf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(load_128(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Vec load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load_128(p))}; }
  static Vec load_i8(const int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
  }
  static void load_bf16_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    const __m256i pairs = load_256(p);
    even.v = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    odd.v = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)));
  }
  static void load_f16_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    const __m256i pairs = load_256(p);
    even.v = _mm256_cvtph_ps(low_halves(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff))));
    odd.v = _mm256_cvtph_ps(low_halves(_mm256_srli_epi32(pairs, 16)));
  }
  // 64 bytes, of which the first `bytes` from p and zeros after them; reads nothing beyond.
  static void copy_bytes(const void* p, int64_t bytes, void* lanes) {
    copy_bytes_singly(p, bytes, lanes);
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store_bf16(uint16_t* p) const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    store_128(p, low_halves(_mm256_blendv_epi8(rounded, quiet, is_nan)));
  }
  void store_f16(uint16_t* p) const {
    store_128(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store_i8(int8_t* p) const {
    const __m256i words = _mm256_cvtps_epi32(v);
    const __m128i halves =
        _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
  }

 private:
  static __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i load_256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static void store_128(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
  // Eight 32-bit lanes below 2^16 as eight 16-bit lanes.
  static __m128i low_halves(__m256i x) {
    const __m256i packed = _mm256_packus_epi32(x, x);  // 0-3 0-3 | 4-7 4-7
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
  }
};

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec operator-(Vec a) { return {_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0f))}; }
inline Vec fmadd(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Vec rint(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x - floor(x) of x brought into the range where 2^x is neither 0 nor infinite; n = floor(x).
inline Vec fraction(Vec x, Vec& n) {
  x = min(Vec::set(130.0f), max(Vec::set(-160.0f), x));
  n.v = _mm256_floor_ps(x.v);
  return x - n;
}
inline Vec power_of_two(__m256i n) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23))};
}
// p * 2^n for integral n in [-252, 252], in two steps so that it overflows and underflows
// gradually.
inline Vec times_power_of_two(Vec p, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n.v), half = _mm256_srai_epi32(whole, 1);
  return p * power_of_two(half) * power_of_two(_mm256_sub_epi32(whole, half));
}
inline Vec copy_sign(Vec magnitude, Vec sign) {
  const __m256 sign_bit = _mm256_and_ps(sign.v, _mm256_set1_ps(-0.0f));
  return {_mm256_or_ps(abs(magnitude).v, sign_bit)};
}
inline Vec select_less(Vec a, Vec b, Vec then, Vec otherwise) {
  return {_mm256_blendv_ps(otherwise.v, then.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
// Lane i: then where bit i is set.
inline Vec select_bits(uint32_t bits, Vec then, Vec otherwise) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
  return {
      _mm256_blendv_ps(otherwise.v, then.v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)))};
}
// Lane i: the sum of the lanes of x[i], i < 8.
inline Vec sum_each(const Vec* x) {
  __m256 halves[2];
  for (int k = 0; k < 2; ++k) {
    const __m256 *a = &x[4 * k].v, *b = &x[4 * k + 1].v, *c = &x[4 * k + 2].v, *d = &x[4 * k + 3].v;
    const __m256 low = _mm256_add_ps(_mm256_unpacklo_ps(*a, *b), _mm256_unpackhi_ps(*a, *b));
    const __m256 high = _mm256_add_ps(_mm256_unpacklo_ps(*c, *d), _mm256_unpackhi_ps(*c, *d));
    halves[k] =
        _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
  }
  return {_mm256_add_ps(_mm256_permute2f128_ps(halves[0], halves[1], 0x20),
                        _mm256_permute2f128_ps(halves[0], halves[1], 0x31))};
}
// Part i of x, kLanes / kParts lanes, at p + i * stride.
template <int kParts>
inline void store_parts(Vec x, float* p, int64_t stride) {
  const __m128 low = _mm256_castps256_ps128(x.v), high = _mm256_extractf128_ps(x.v, 1);
  if constexpr (kParts == 2) {
    _mm_storeu_ps(p, low);
    _mm_storeu_ps(p + stride, high);
  } else {
    static_assert(kParts == 4);
    _mm_storel_pi(reinterpret_cast<__m64*>(p), low);
    _mm_storeh_pi(reinterpret_cast<__m64*>(p + stride), low);
    _mm_storel_pi(reinterpret_cast<__m64*>(p + 2 * stride), high);
    _mm_storeh_pi(reinterpret_cast<__m64*>(p + 3 * stride), high);
  }
}
// Lane j of x[i] becomes lane i of x[j], i and j < 8.
inline void transpose_lanes(Vec* x) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 4) {  // 4 x 4 blocks of one half
    const __m256 a = _mm256_unpacklo_ps(x[i].v, x[i + 1].v);
    const __m256 b = _mm256_unpackhi_ps(x[i].v, x[i + 1].v);
    const __m256 c = _mm256_unpacklo_ps(x[i + 2].v, x[i + 3].v);
    const __m256 d = _mm256_unpackhi_ps(x[i + 2].v, x[i + 3].v);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int k = 0; k < 4; ++k) {
    x[k].v = _mm256_permute2f128_ps(t[k], t[k + 4], 0x20);
    x[k + 4].v = _mm256_permute2f128_ps(t[k], t[k + 4], 0x31);
  }
}
// The even and the odd elements of a, b taken as one row; and back.
inline void deinterleave(Vec a, Vec b, Vec& even, Vec& odd) {
  const __m256 low = _mm256_permute2f128_ps(a.v, b.v, 0x20);
  const __m256 high = _mm256_permute2f128_ps(a.v, b.v, 0x31);
  even.v = _mm256_shuffle_ps(low, high, 0x88);
  odd.v = _mm256_shuffle_ps(low, high, 0xdd);
}
inline void interleave(Vec even, Vec odd, Vec& a, Vec& b) {
  const __m256 low = _mm256_unpacklo_ps(even.v, odd.v), high = _mm256_unpackhi_ps(even.v, odd.v);
  a.v = _mm256_permute2f128_ps(low, high, 0x20);
  b.v = _mm256_permute2f128_ps(low, high, 0x31);
}
inline float reduce_add(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float reduce_max(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

inline Int operator&(Int a, Int b) { return {_mm256_and_si256(a.v, b.v)}; }
inline Int operator|(Int a, Int b) { return {_mm256_or_si256(a.v, b.v)}; }
template <int kBits>
inline Int shift_left(Int a) {
  return {_mm256_slli_epi32(a.v, kBits)};
}
template <int kBits>
inline Int shift_right(Int a) {
  return {_mm256_srli_epi32(a.v, kBits)};
}
// The sum of 16 bytes.
inline int32_t sum_of_16(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i above = _mm_xor_si128(bytes, _mm_set1_epi8(-128));  // + 128: unsigned
  const __m128i halves = _mm_sad_epu8(above, _mm_setzero_si128());
  return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 128;
}
inline Vec to_float(Int a) { return {_mm256_cvtepi32_ps(a.v)}; }
// sum + the products of unsigned bytes of u with signed bytes of s. Even and odd bytes are widened
// first: vpmaddubsw would saturate where two products leave 16 bits.
inline Int dot_bytes(Int sum, Int u, Int s) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u.v, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s.v, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u.v, 8), _mm256_srai_epi16(s.v, 8));
  return {_mm256_add_epi32(_mm256_add_epi32(sum.v, even), odd)};
}
// The same for u below 64, where vpmaddubsw is exact.
inline Int dot_small_bytes(Int sum, Int u, Int s) {
  const __m256i pairs = _mm256_maddubs_epi16(u.v, s.v);
  return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
}

}  // namespace

#include "../kernels/all.h"

namespace fasttps::cpu {
const KernelTable kAvx2Kernels = kernel_table_for<Vec>("avx2", kAvx2Bit | kFmaBit | kF16cBit);
}  // namespace fasttps::cpu
