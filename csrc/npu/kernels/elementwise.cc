#include "kernel.h"

// Of 16 lanes the first `count`, where not all are there.
inline f32x16 load_first(const float* from, int32_t count) {
  if (count >= 16) return aie::load_v<16>(from);
  f32x16 out = aie::zeros<float, 16>();
  for (int32_t i = 0; i < count; ++i) out.set(from[i], static_cast<unsigned>(i));
  return out;
}
inline void store_first(bfloat16* to, const bf16x16& from, int32_t count) {
  if (count >= 16) {
    aie::store_v(to, from);
    return;
  }
  for (int32_t i = 0; i < count; ++i) to[i] = from.get(static_cast<unsigned>(i));
}

TILE_KERNEL void copy(const uint8_t* from, uint8_t* to, int32_t bytes) {
  for (int32_t i = 0; i < bytes; ++i) to[i] = from[i];
}

TILE_KERNEL void f32_to_bf16(const float* from, bfloat16* to, int32_t n) {
  const RoundToEven even;
  for (int32_t i = 0; i < n; i += 16) {
    store_first(to + i, narrow(load_first(from + i, n - i)), n - i);
  }
}

// to = from * scale. n a multiple of 16.
TILE_KERNEL void scale_tile(const float* from, bfloat16* to, int32_t n, int32_t scale_bits) {
  const RoundToEven even;
  for (int32_t i = 0; i < n; i += 16)
    aie::store_v(to + i, narrow(times(aie::load_v<16>(from + i), as_float(scale_bits))));
}

// x / (1 + 2^-t), t at least -126 so that the power stays finite.
inline f32x16 times_logistic(const f32x16& x, const f32x16& t) {
  const f32x16 negative =
      aie::min(aie::sub(aie::zeros<float, 16>(), t), aie::broadcast<float, 16>(126));
  const f32x16 below = aie::add(exp2_series(negative), aie::broadcast<float, 16>(1));
  return times(x, aie::inv(below));
}

// x Phi(x), with erfc by Abramowitz and Stegun 7.1.26.
inline f32x16 gelu(const f32x16& x) {
  const f32x16 negative = aie::sub(aie::zeros<float, 16>(), x);
  const f32x16 z = times(aie::max(x, negative), 0.70710678f);
  const auto one = aie::broadcast<float, 16>(1);
  const f32x16 t = aie::inv(aie::add(one, times(z, 0.3275911f)));
  constexpr float kSeries[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f,
                               0.254829592f};
  f32x16 p = aie::broadcast<float, 16>(kSeries[0]);
  for (int32_t i = 1; i < 5; ++i) p = aie::add(times(p, t), aie::broadcast<float, 16>(kSeries[i]));
  const f32x16 tail = times(times(times(p, t), exp2_series(times(times(z, z), -kLog2e))), 0.5f);
  return times(x, aie::select(aie::sub(one, tail), tail, aie::lt(x, aie::zeros<float, 16>())));
}

// out = act(gate) * up, the up and gate in f32. mode: 0 silu, 1 gelu, 2 gelu_tanh.
TILE_KERNEL void silu_mul(const float* gate, const float* up, bfloat16* out, int32_t n,
                          int32_t mode) {
  const RoundToEven even;
  for (int32_t i = 0; i < n; i += 16) {
    const f32x16 g = load_first(gate + i, n - i);
    f32x16 y;
    if (mode == 0) {
      y = times_logistic(g, times(g, kLog2e));
    } else if (mode == 1) {
      y = gelu(g);
    } else {
      const f32x16 cubic = aie::add(g, times(times(times(g, g), g), 0.044715f));
      y = times_logistic(g, times(cubic, 2 * 0.79788456f * kLog2e));
    }
    store_first(out + i, narrow(times(y, load_first(up + i, n - i))), n - i);
  }
}

// p = softmax of the first `valid` columns of each row of s, where s is in base 2's domain; 0 past
// them. columns a multiple of 16.
TILE_KERNEL void softmax_rows(const bfloat16* s, bfloat16* p, int32_t rows, int32_t columns,
                              int32_t valid) {
  const RoundToEven even;
  for (int32_t r = 0; r < rows; ++r, s += columns, p += columns) {
    f32x16 most = aie::broadcast<float, 16>(kLowest), sum = aie::zeros<float, 16>();
    for (int32_t j = 0; j < columns; j += 16)
      most = aie::max(most, keep_first(widen(aie::load_v<16>(s + j)), valid - j, kLowest));
    const auto maximum = aie::broadcast<float, 16>(aie::reduce_max(most));
    for (int32_t j = 0; j < columns; j += 16) {
      const f32x16 e = widen(exp2_bf16(aie::sub(widen(aie::load_v<16>(s + j)), maximum)));
      const f32x16 kept = keep_first(e, valid - j, 0);
      sum = aie::add(sum, kept);
      aie::store_v(p + j, narrow(kept));
    }
    const float total = aie::reduce_add(sum);
    const float scale = total == 0 ? 0 : aie::inv(total);
    for (int32_t j = 0; j < columns; j += 16)
      aie::store_v(p + j, narrow(times(widen(aie::load_v<16>(p + j)), scale)));
  }
}
