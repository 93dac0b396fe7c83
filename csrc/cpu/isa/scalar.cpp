#include <cstdint>

#include "../kernel_table.h"
#include "../kernels/half.h"

namespace {

struct Vec {
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
  void store(float* p) const { *p = v; }
  void store_bf16(uint16_t* p) const { *p = f32_to_bf16(v); }
  void store_f16(uint16_t* p) const { *p = f32_to_f16(v); }
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
inline Vec power_of_two(Vec n) {
  const int32_t exponent = n.v == n.v ? static_cast<int32_t>(n.v) : 0;
  return {bits_to_f32(static_cast<uint32_t>(exponent + 127) << 23)};
}
inline Vec copy_sign(Vec magnitude, Vec sign) { return {__builtin_copysignf(magnitude.v, sign.v)}; }
inline Vec select_less(Vec a, Vec b, Vec then, Vec otherwise) {
  return a.v < b.v ? then : otherwise;
}
inline float reduce_add(Vec a) { return a.v; }
inline float reduce_max(Vec a) { return a.v; }

}  // namespace

#include "../kernels/all.h"

namespace fasttps::cpu {
const KernelTable kScalarKernels = kernel_table_for<Vec>("scalar", 0);
}  // namespace fasttps::cpu
