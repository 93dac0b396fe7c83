#pragma once
#include <cstdint>

// Scalar conversions between f32 and the 16-bit types; round to nearest, ties to even.
namespace {

inline float bits_to_f32(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t f32_to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float bf16_to_f32(uint16_t h) { return bits_to_f32(uint32_t{h} << 16); }

inline uint16_t f32_to_bf16(float x) {
  const uint32_t bits = f32_to_bits(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);  // quiet, never rounded to inf
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16;
  const uint32_t exponent = (h >> 10) & 0x1f;
  const uint32_t mantissa = h & 0x3ff;
  if (exponent == 0x1f) return bits_to_f32(sign | 0x7f800000 | (mantissa << 13));
  if (exponent != 0) return bits_to_f32(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
  return bits_to_f32(sign | f32_to_bits(subnormal));
}

inline uint16_t f32_to_f16(float x) {
  const uint32_t bits = f32_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((bits >> 13) & 0x3ff));
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds past 65504
  if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 leaves the multiple of 2^-24 below it
    const uint32_t rounded = f32_to_bits(bits_to_f32(magnitude) + 0.5f);
    return static_cast<uint16_t>(sign | (rounded - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

// 64 bytes, of which the first `bytes` from p and zeros after them.
inline void copy_bytes_singly(const void* p, int64_t bytes, void* lanes) {
  const auto* from = static_cast<const uint8_t*>(p);
  auto* to = static_cast<uint8_t*>(lanes);
  for (int64_t i = 0; i < 64; ++i) to[i] = i < bytes ? from[i] : 0;
}

}  // namespace
