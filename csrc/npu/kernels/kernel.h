#pragma once
#include <aie_api/aie.hpp>
#include <cstdint>

// What tile kernels share. They use the AIE API and <cstdint> alone: a core's compiler makes them
// too. Numbers that are f32 come as `_bits`, since a call's numbers are integers.
#ifdef FASTTPS_HOST
#define TILE_KERNEL static
#else
#define TILE_KERNEL extern "C"
#endif

using f32x16 = aie::vector<float, 16>;
using bf16x16 = aie::vector<bfloat16, 16>;

constexpr float kLowest = -3.4028234e38f;
constexpr float kLog2e = 1.44269504f;

inline float as_float(int32_t bits) { return __builtin_bit_cast(float, bits); }

// Conversions round to nearest even while one of these lives.
struct RoundToEven {
  aie::rounding_mode old = aie::swap_rounding(aie::rounding_mode::conv_even);
  ~RoundToEven() { aie::set_rounding(old); }
};

inline f32x16 times(const f32x16& a, const f32x16& b) {
  return aie::mul(a, b).template to_vector<float>();
}
inline f32x16 times(const f32x16& a, float b) { return times(a, aie::broadcast<float, 16>(b)); }
inline f32x16 widen(const bf16x16& v) { return aie::accum<accfloat, 16>(v).to_vector<float>(); }
inline bf16x16 narrow(const f32x16& v) { return aie::accum<accfloat, 16>(v).to_vector<bfloat16>(); }

// Lanes of `v` from `valid` on become `other`.
inline f32x16 keep_first(f32x16 v, int32_t valid, float other) {
  for (int32_t i = valid < 0 ? 0 : valid; i < 16; ++i) v.set(other, i);
  return v;
}

// 2^x in f32 for x <= 127: x = n + f, |f| <= 1/2, and Taylor's series of 2^f to f^6, off by at most
// 2e-7; 0 below 2^-126.
inline f32x16 exp2_series(f32x16 x) {
  const auto small = aie::lt(x, aie::broadcast<float, 16>(-126));
  x = aie::select(x, aie::broadcast<float, 16>(-126), small);
  const auto n = aie::to_fixed<int32_t>(x);
  const f32x16 f = aie::sub(x, aie::to_float<float>(n));
  constexpr float kSeries[] = {
      1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 0.24022651f, 0.69314718f, 1};
  f32x16 p = aie::broadcast<float, 16>(kSeries[0]);
  for (int32_t i = 1; i < 7; ++i) p = aie::add(times(p, f), aie::broadcast<float, 16>(kSeries[i]));
  // Times 2^n: n added to the exponent.
  const auto bits = aie::add(p.template cast_to<int32_t>(), aie::upshift(n, 23));
  return aie::select(bits.template cast_to<float>(), aie::zeros<float, 16>(), small);
}

// 2^x in bf16: AIE2P's instruction, AIE2's series.
inline bf16x16 exp2_bf16(const f32x16& x) {
#if __AIE_ARCH__ >= 21
  return aie::exp2<bfloat16>(x);
#else
  return narrow(exp2_series(x));
#endif
}
inline float exp2_one(float x) { return exp2_series(aie::broadcast<float, 16>(x)).get(0); }
