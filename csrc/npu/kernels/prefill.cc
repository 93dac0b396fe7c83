// The three stages of STEEL (paper 002, algorithm 1) for blocks of 64 queries and 64 keys.
//   Q, K, V, P  blocks [64, cols] bf16 as the multiplier wants them: tiles of 8 x 8, row-major in a
//   tile
//               and tile after tile along a row of tiles
// A block's coordinates count blocks of 64; query 0 stands at position `offset`, and of `tokens`
// queries those behind are padding. Blocks that no query of theirs may see are left alone.
#include "exp2.h"
#include "kernel.h"

// 0: nothing to do; 1: all of it; 2: the diagonal goes through it.
inline int64_t block_kind(int64_t row_block, int64_t column_block, int64_t tokens, int64_t offset) {
  const int64_t first = row_block * 64, last = first + 63;
  if (first >= tokens || column_block * 64 > offset + last) return 0;
  return column_block * 64 + 63 > offset + first ? 2 : 1;
}

inline const bfloat16* tiled_row(const void* block, int64_t row, int64_t cols) {
  return static_cast<const bfloat16*>(block) + row / 8 * 8 * cols + row % 8 * 8;
}

// First stage: a = Q K^T scaled for base 2, and m' = max(m, rowmax a).
//   a  [64, 64] f32 row-major, then m [64] and m' [64] f32; most: m [64] f32, the core's own
FASTTPS_KERNEL void steel_scores(const void* q, const void* k, void* a, void* most,
                                 int64_t head_dim, int64_t row_block, int64_t column_block,
                                 int64_t tokens, int64_t offset, int64_t scale_bits) {
  const int64_t kind = block_kind(row_block, column_block, tokens, offset);
  if (kind == 0) return;
  const auto scale = std::bit_cast<float>(static_cast<uint32_t>(scale_bits));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  auto* scores = static_cast<float*>(a);
  auto* old_most = scores + 64 * 64;
  auto* running = static_cast<float*>(most);
  for (int64_t r = 0; r < 64; ++r) {
    const bfloat16* query = tiled_row(q, r, head_dim);
    float largest = column_block == 0 ? -kInfinity : running[r];
    old_most[r] = largest;
    // Keys that this query sees.
    const int64_t seen = offset + row_block * 64 + r + 1 - column_block * 64;
    for (int64_t c = 0; c < 64; ++c) {
      if (c >= seen) {
        scores[r * 64 + c] = -kInfinity;
        continue;
      }
      const bfloat16* key = tiled_row(k, c, head_dim);
      auto sum = aie::zeros<accfloat, 8>();
      for (int64_t i = 0; i < head_dim; i += 8) {
        sum = aie::mac(sum, aie::load_v<8>(query + i * 8), aie::load_v<8>(key + i * 8));
      }
      const float score = aie::reduce_add(sum.to_vector<float>()) * scale;
      scores[r * 64 + c] = score;
      if (score > largest || score != score) largest = score;
    }
    running[r] = old_most[64 + r] = largest;
  }
}

// Second stage: P = 2^(a - m'), v = 2^(m - m'), l = v l + rowsum P.
//   p  [64, 64] bf16 row-major; state: v [64] and l [64] f32; sums: l [64] f32, the core's own
FASTTPS_KERNEL void steel_softmax(const void* a, void* p, void* state, void* sums,
                                  int64_t row_block, int64_t column_block, int64_t tokens,
                                  int64_t offset) {
  if (block_kind(row_block, column_block, tokens, offset) == 0) return;
  const auto mode = aie::swap_rounding(aie::rounding_mode::conv_even);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto* scores = static_cast<const float*>(a);
  const auto* old_most = scores + 64 * 64;
  auto* weights = static_cast<bfloat16*>(p);
  auto* factor = static_cast<float*>(state);
  auto* running = static_cast<float*>(sums);
  for (int64_t r = 0; r < 64; r += 16) {
    auto change = aie::sub(aie::load_v<16>(old_most + r), aie::load_v<16>(old_most + 64 + r));
    // Nothing before: -inf - -inf, and no factor of what is not there.
    for (unsigned i = 0; i < 16; ++i) {
      if (old_most[r + i] == -kInfinity) change.set(-kInfinity, i);
    }
    aie::store_v(factor + r, exp2_polynomial(change));
  }
  for (int64_t r = 0; r < 64; ++r) {
    const float most = old_most[64 + r];
    const auto shift = aie::broadcast<float, 16>(most == -kInfinity ? 0.0f : most);
    auto sum = aie::zeros<accfloat, 16>();
    for (int64_t c = 0; c < 64; c += 16) {
      const auto power = exp2_polynomial(aie::sub(aie::load_v<16>(scores + r * 64 + c), shift));
      const auto rounded = aie::accum<accfloat, 16>(power).to_vector<bfloat16>();
      aie::store_v(weights + r * 64 + c, rounded);
      sum = aie::add(sum, aie::accum<accfloat, 16>(rounded));
    }
    const float before = column_block == 0 ? 0.0f : running[r] * factor[r];
    running[r] = factor[64 + r] = before + aie::reduce_add(sum.to_vector<float>());
  }
  aie::set_rounding(mode);
}

// Third stage: o = v o + P V.
//   o [64, head_dim] f32 row-major and sums [64] f32, l as it was last, are the core's own
FASTTPS_KERNEL void steel_values(const void* p, const void* v, const void* state, void* o,
                                 void* sums, int64_t head_dim, int64_t row_block,
                                 int64_t column_block, int64_t tokens, int64_t offset) {
  if (block_kind(row_block, column_block, tokens, offset) == 0) return;
  const auto* factor = static_cast<const float*>(state);
  const auto* values = static_cast<const bfloat16*>(v);
  auto* last = static_cast<float*>(sums);
  for (int64_t r = 0; r < 64; ++r) {
    const bfloat16* weights = tiled_row(p, r, 64);
    const int64_t seen = offset + row_block * 64 + r + 1 - column_block * 64;
    last[r] = factor[64 + r];
    for (int64_t c = 0; c < head_dim; c += 8) {
      float* out = static_cast<float*>(o) + r * head_dim + c;
      auto sum = aie::zeros<accfloat, 8>();
      if (column_block > 0) {
        sum = aie::mul(aie::load_v<8>(out), aie::broadcast<float, 8>(factor[r]));
      }
      // A weight of 0 must not meet what a key that is not seen holds.
      for (int64_t j = 0; j < 64 && j < seen; ++j) {
        const auto weight = aie::broadcast<bfloat16, 8>(weights[j / 8 * 64 + j % 8]);
        const bfloat16* value = values + j / 8 * 8 * head_dim + c * 8 + j % 8 * 8;
        sum = aie::mac(sum, aie::load_v<8>(value), weight);
      }
      aie::store_v(out, sum.to_vector<float>());
    }
  }
}

// o / l as bf16; 0 for padding and where the sum is.
//   o [64, head_dim] f32, sums [64] f32, y [64, head_dim] bf16
FASTTPS_KERNEL void steel_finish(const void* o, const void* sums, void* y, int64_t head_dim,
                                 int64_t row_block, int64_t tokens) {
  const auto mode = aie::swap_rounding(aie::rounding_mode::conv_even);
  const auto* source = static_cast<const float*>(o);
  const auto* total = static_cast<const float*>(sums);
  auto* target = static_cast<bfloat16*>(y);
  for (int64_t r = 0; r < 64; ++r) {
    const bool there = row_block * 64 + r < tokens && total[r] != 0.0f;
    const auto factor = aie::broadcast<float, 16>(there ? aie::inv(total[r]) : 0.0f);
    for (int64_t c = 0; c < head_dim; c += 16) {
      auto x = aie::load_v<16>(source + r * head_dim + c);
      if (!there) x = aie::zeros<float, 16>();
      aie::store_v(target + r * head_dim + c, aie::mul(x, factor).to_vector<bfloat16>());
    }
  }
  aie::set_rounding(mode);
}
