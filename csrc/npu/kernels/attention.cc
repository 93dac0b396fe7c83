// Kernels of attention for one token: a core has query heads that share a KV head.
#include "kernel.h"

// RoPE of `rows` rows of head_dim elements with one table, in float32, to bf16 (FastTPS, paper 000,
// TPSFLAT: queries and key of a head are one tensor).
//   half split: y[i] = x[i] cos[i] - x[i + r/2] sin[i], y[i + r/2] = x[i + r/2] cos[i + r/2] + x[i]
//   sin[i + r/2] for i below r/2, r = rotary_dim; interleaved: the same of neighbours 2i and 2i
//   + 1. Elements from r on are copied. x, y [rows, head_dim] bf16, may be the same; cos, sin
//   [rotary_dim] f32
TILE_KERNEL void rope(const void* x, const void* cos, const void* sin, void* y, int32_t rows,
                      int32_t head_dim, int32_t rotary_dim, int32_t interleaved) {
  const RoundToEven even;
  const auto* source = static_cast<const bfloat16*>(x);
  const auto* cosines = static_cast<const float*>(cos);
  const auto* sines = static_cast<const float*>(sin);
  auto* target = static_cast<bfloat16*>(y);
  const int32_t half = rotary_dim / 2;
  for (int32_t r = 0; r < rows; ++r, source += head_dim, target += head_dim) {
    for (int32_t i = 0; i < half; ++i) {
      const int32_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
      const float low = source[a], high = source[b];
      aie::vector<float, 2> pair;
      pair.set(low * cosines[a] - high * sines[a], 0);
      pair.set(high * cosines[b] + low * sines[b], 1);
      const auto rounded = aie::accum<accfloat, 2>(pair).to_vector<bfloat16>();
      target[a] = rounded.get(0);
      target[b] = rounded.get(1);
    }
    for (int32_t i = rotary_dim; i < head_dim; ++i) target[i] = source[i];
  }
}

// s[r, first + j] = q[r] . k[j] * scale for the `count` first keys of a block.
//   q [rows, head_dim] bf16, k [.., head_dim] bf16, s [rows, slots] f32; scale: float32's bits
TILE_KERNEL void decode_scores(const void* q, const void* k, void* s, int32_t rows,
                               int32_t head_dim, int32_t slots, int32_t first, int32_t count,
                               int32_t scale_bits) {
  const auto* queries = static_cast<const bfloat16*>(q);
  const auto* keys = static_cast<const bfloat16*>(k);
  auto* scores = static_cast<float*>(s);
  const auto scale = std::bit_cast<float>(static_cast<uint32_t>(scale_bits));
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t j = 0; j < count; ++j) {
      auto sum = aie::zeros<accfloat, 32>();
      for (int32_t c = 0; c < head_dim; c += 32) {
        sum = aie::mac(sum, aie::load_v<32>(queries + r * head_dim + c),
                       aie::load_v<32>(keys + j * head_dim + c));
      }
      scores[r * slots + first + j] = aie::reduce_add(sum.to_vector<float>()) * scale;
    }
  }
}

// Of each row of scores, in base 2: p[j] = 2^(s[j] - max s) as bf16, over the row's own memory from
// its beginning on, and their float32 sum.
//   s [rows, slots] f32 of which `count` are there, sums [rows] f32
TILE_KERNEL void decode_softmax(void* s, void* sums, int32_t rows, int32_t slots, int32_t count) {
  const RoundToEven even;
  auto* sum_of_row = static_cast<float*>(sums);
  for (int32_t r = 0; r < rows; ++r) {
    float* scores = static_cast<float*>(s) + r * slots;
    auto* weights = reinterpret_cast<bfloat16*>(scores);
    float most = scores[0];
    for (int32_t j = 1; j < count; ++j)
      most = scores[j] > most || scores[j] != scores[j] ? scores[j] : most;
    // All -inf: 2^(-inf + inf) would be NaN, and no weight is what such a row has.
    const float shift = most == -std::numeric_limits<float>::infinity() ? 0.0f : most;
    f32x16 sum = aie::zeros<float, 16>();
    for (int32_t j = 0; j < count; j += 16) {
      const int32_t lanes = count - j < 16 ? count - j : 16;
      auto x = aie::broadcast<float, 16>(-std::numeric_limits<float>::infinity());
      for (int32_t i = 0; i < lanes; ++i) x.set(scores[j + i], static_cast<unsigned>(i));
      // What is summed is what is multiplied: the weights as bf16.
      const bf16x16 rounded = exp2_bf16(aie::sub(x, aie::broadcast<float, 16>(shift)));
      sum = aie::add(sum, widen(rounded));
      for (int32_t i = 0; i < lanes; ++i) weights[j + i] = rounded.get(static_cast<unsigned>(i));
    }
    sum_of_row[r] = aie::reduce_add(sum);
  }
}

// o[r] (+)= sum_j p[r, first + j] v[j] over the `count` first rows of a block.
//   p as decode_softmax leaves it in [rows, slots] of float32's size, v [.., head_dim] bf16,
//   o [rows, head_dim] f32; first = 0 begins it
TILE_KERNEL void decode_values(const void* p, const void* v, void* o, int32_t rows,
                               int32_t head_dim, int32_t slots, int32_t first, int32_t count) {
  const auto* values = static_cast<const bfloat16*>(v);
  for (int32_t r = 0; r < rows; ++r) {
    const auto* weights =
        reinterpret_cast<const bfloat16*>(static_cast<const float*>(p) + r * slots) + first;
    float* out = static_cast<float*>(o) + r * head_dim;
    for (int32_t c = 0; c < head_dim; c += 32) {
      auto sum = aie::zeros<accfloat, 32>();
      if (first > 0) sum = aie::accum<accfloat, 32>(aie::load_v<32>(out + c));
      for (int32_t j = 0; j < count; ++j) {
        sum = aie::mac(sum, aie::load_v<32>(values + j * head_dim + c),
                       aie::broadcast<bfloat16, 32>(weights[j]));
      }
      aie::store_v(out + c, sum.to_vector<float>());
    }
  }
}

// y = o / sum as bf16; 0 where the sum is.
//   o [head_dim] f32, sum [1] f32, y [head_dim] bf16
TILE_KERNEL void decode_finish(const void* o, const void* sum, void* y, int32_t head_dim) {
  const RoundToEven even;
  const auto* source = static_cast<const float*>(o);
  const float total = *static_cast<const float*>(sum);
  const auto factor = aie::broadcast<float, 16>(total == 0.0f ? 0.0f : aie::inv(total));
  auto* target = static_cast<bfloat16*>(y);
  for (int32_t c = 0; c < head_dim; c += 16) {
    aie::store_v(target + c, aie::mul(aie::load_v<16>(source + c), factor).to_vector<bfloat16>());
  }
}
