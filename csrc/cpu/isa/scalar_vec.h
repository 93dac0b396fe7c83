#pragma once
#include <cstdint>

#include "../kernel_table.h"
#include "../kernels/half.h"
#include "../kernels/one_quad.h"

namespace {

struct Vec {
  using Int = OneQuad;
  using Pairs = OneQuad;
  static constexpr bool kHasLookup = false;
  static constexpr int64_t kLanes = 1;
  static constexpr bool kBf16Dot = false;
  float v;

  static Vec set(float x) { return {x}; }
  static Vec load(const float* p) { return {*p}; }
  static Vec load_bf16(const uint16_t* p) { return {bf16_to_f32(*p)}; }
  static Vec load_f16(const uint16_t* p) { return {f16_to_f32(*p)}; }
  static Vec load_i8(const int8_t* p) { return {static_cast<float>(*p)}; }
  static void load_bf16_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    even = load_bf16(p);
    odd = load_bf16(p + 1);
  }
  static void load_f16_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    even = load_f16(p);
    odd = load_f16(p + 1);
  }
  static void copy_bytes(const void* p, int64_t bytes, void* lanes) {
    copy_bytes_singly(p, bytes, lanes);
  }
  void store(float* p) const { *p = v; }
  void store_bf16(uint16_t* p) const { *p = f32_to_bf16(v); }
  void store_f16(uint16_t* p) const { *p = f32_to_f16(v); }
  void store_i8(int8_t* p) const { *p = static_cast<int8_t>(v); }
};

inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec operator-(Vec a) { return {-a.v}; }
inline Vec fmadd(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec min(Vec a, Vec b) { return a.v < b.v ? a : b; }
inline Vec max(Vec a, Vec b) { return a.v > b.v ? a : b; }
inline Vec abs(Vec a) { return {__builtin_fabsf(a.v)}; }
// To the nearest integer, ties to even, for |x| < 2^22; without the C library. NaN stays NaN.
inline Vec rint(Vec a) { return {(a.v + 0x1.8p23f) - 0x1.8p23f}; }
// x - floor(x) of x brought into the range where 2^x is neither 0 nor infinite; n = floor(x).
inline Vec fraction(Vec x, Vec& n) {
  x = min(Vec::set(130.0f), max(Vec::set(-160.0f), x));
  n = rint(x);
  if (n.v > x.v) n.v -= 1.0f;
  return x - n;
}
inline Vec power_of_two(int32_t n) { return {bits_to_f32(static_cast<uint32_t>(n + 127) << 23)}; }
// p * 2^n for integral n in [-252, 252], in two steps so that it overflows and underflows
// gradually.
inline Vec times_power_of_two(Vec p, Vec n) {
  const int32_t whole = n.v == n.v ? static_cast<int32_t>(n.v) : 0, half = whole / 2;
  return p * power_of_two(half) * power_of_two(whole - half);
}
inline Vec copy_sign(Vec magnitude, Vec sign) { return {__builtin_copysignf(magnitude.v, sign.v)}; }
inline Vec select_less(Vec a, Vec b, Vec then, Vec otherwise) {
  return a.v < b.v ? then : otherwise;
}
inline Vec select_bits(uint32_t bits, Vec then, Vec otherwise) {
  return (bits & 1) != 0 ? then : otherwise;
}
inline Vec sum_each(const Vec* x) { return x[0]; }
inline void transpose_lanes(Vec*) {}
inline void deinterleave(Vec a, Vec b, Vec& even, Vec& odd) {
  even = a;
  odd = b;
}
inline void interleave(Vec even, Vec odd, Vec& a, Vec& b) {
  a = even;
  b = odd;
}
inline float reduce_add(Vec a) { return a.v; }
inline float reduce_max(Vec a) { return a.v; }
inline int32_t sum_of_16(const int8_t* p) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += p[i];
  return sum;
}
inline Vec to_float(OneQuad a) { return {static_cast<float>(static_cast<int32_t>(a.v))}; }
// sum + the products of unsigned bytes of u with signed bytes of s.
inline OneQuad dot_bytes(OneQuad sum, OneQuad u, OneQuad s) {
  int32_t total = static_cast<int32_t>(sum.v);
  for (int bits = 0; bits < 32; bits += 8) {
    total += static_cast<int32_t>((u.v >> bits) & 0xff) * static_cast<int8_t>(s.v >> bits);
  }
  return OneQuad::set(total);
}
inline OneQuad dot_small_bytes(OneQuad sum, OneQuad u, OneQuad s) { return dot_bytes(sum, u, s); }

}  // namespace
