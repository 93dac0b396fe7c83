// The three stages of STEEL (paper 002, algorithm 1) for blocks of 64 queries and 64 keys.
//   Q, K, V, P  blocks [64, cols] bf16 as the multiplier wants them: tiles of 8 x 8, row-major in a
//   tile
//               and tile after tile along a row of tiles
// A block's coordinates count blocks of 64; query 0 stands at position `offset`, and of `tokens`
// queries those behind are padding. Blocks that no query of theirs may see are left alone.
#include "kernel.h"

// 0: nothing to do; 1: all of it; 2: the diagonal goes through it.
inline int32_t block_kind(int32_t row_block, int32_t column_block, int32_t tokens, int32_t offset) {
  const int32_t first = row_block * 64, last = first + 63;
  if (first >= tokens || column_block * 64 > offset + last) return 0;
  return column_block * 64 + 63 > offset + first ? 2 : 1;
}

inline const bfloat16* tiled_row(const void* block, int32_t row, int32_t cols) {
  return static_cast<const bfloat16*>(block) + row / 8 * 8 * cols + row % 8 * 8;
}

// First stage: a = Q K^T scaled for base 2, and m' = max(m, rowmax a).
//   a  [64, 64] f32 row-major, then m [64] and m' [64] f32; most: m [64] f32, the core's own
TILE_KERNEL void steel_scores(const void* q, const void* k, void* a, void* most, int32_t head_dim,
                              int32_t row_block, int32_t column_block, int32_t tokens,
                              int32_t offset, int32_t scale_bits) {
  const int32_t kind = block_kind(row_block, column_block, tokens, offset);
  if (kind == 0) return;
  const auto scale = std::bit_cast<float>(static_cast<uint32_t>(scale_bits));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  auto* scores = static_cast<float*>(a);
  auto* old_most = scores + 64 * 64;
  auto* running = static_cast<float*>(most);
  for (int32_t i = 0; i < 64; i += 8) {
    for (int32_t j = 0; j < 64; j += 8) {
      Multiplier product(aie::zeros<float, 64>());
      for (int32_t c = 0; c < head_dim; c += 8) {
        const auto keys = aie::load_v<64>(static_cast<const bfloat16*>(k) + j * head_dim + c * 8);
        product.mac(aie::load_v<64>(static_cast<const bfloat16*>(q) + i * head_dim + c * 8),
                    aie::transpose(keys, 8, 8));
      }
      const auto tile = product.to_vector<float>();
      for (int32_t r = 0; r < 8; ++r) {
        const auto row = tile.extract<8>(static_cast<unsigned>(r));
        aie::store_v(scores + (i + r) * 64 + j,
                     aie::mul(row, aie::broadcast<float, 8>(scale)).to_vector<float>());
      }
    }
  }
  for (int32_t r = 0; r < 64; ++r) {
    float largest = column_block == 0 ? -kInfinity : running[r];
    old_most[r] = largest;
    // Keys that this query sees.
    const int32_t seen = offset + row_block * 64 + r + 1 - column_block * 64;
    for (int32_t c = 0; c < 64; ++c) {
      float& score = scores[r * 64 + c];
      if (c >= seen) score = -kInfinity;
      if (score > largest || score != score) largest = score;
    }
    running[r] = old_most[64 + r] = largest;
  }
}

// Second stage: P = 2^(a - m'), v = 2^(m - m'), l = v l + rowsum P.
//   p  [64, 64] bf16 row-major; state: v [64] and l [64] f32; sums: l [64] f32, the core's own
TILE_KERNEL void steel_softmax(const void* a, void* p, void* state, void* sums, int32_t row_block,
                               int32_t column_block, int32_t tokens, int32_t offset) {
  if (block_kind(row_block, column_block, tokens, offset) == 0) return;
  const RoundToEven even;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto* scores = static_cast<const float*>(a);
  const auto* old_most = scores + 64 * 64;
  auto* weights = static_cast<bfloat16*>(p);
  auto* factor = static_cast<float*>(state);
  auto* running = static_cast<float*>(sums);
  for (int32_t r = 0; r < 64; r += 16) {
    auto change = aie::sub(aie::load_v<16>(old_most + r), aie::load_v<16>(old_most + 64 + r));
    // Nothing before: -inf - -inf, and no factor of what is not there.
    for (unsigned i = 0; i < 16; ++i) {
      if (old_most[r + i] == -kInfinity) change.set(-kInfinity, i);
    }
    aie::store_v(factor + r, exp2_series(change));
  }
  for (int32_t r = 0; r < 64; ++r) {
    const float most = old_most[64 + r];
    const auto shift = aie::broadcast<float, 16>(most == -kInfinity ? 0.0f : most);
    f32x16 sum = aie::zeros<float, 16>();
    for (int32_t c = 0; c < 64; c += 16) {
      const bf16x16 rounded = exp2_bf16(aie::sub(aie::load_v<16>(scores + r * 64 + c), shift));
      aie::store_v(weights + r * 64 + c, rounded);
      sum = aie::add(sum, widen(rounded));
    }
    const float before = column_block == 0 ? 0.0f : running[r] * factor[r];
    running[r] = factor[64 + r] = before + aie::reduce_add(sum);
  }
}

// o += P V, by the multiplier.
inline void add_whole_block(const void* p, const void* v, float* o, int32_t head_dim) {
  const auto* weights = static_cast<const bfloat16*>(p);
  const auto* values = static_cast<const bfloat16*>(v);
  for (int32_t i = 0; i < 64; i += 8) {
    for (int32_t c = 0; c < head_dim; c += 8) {
      aie::vector<float, 64> start;
      for (int32_t r = 0; r < 64; ++r) {
        start.set(o[(i + r / 8) * head_dim + c + r % 8], static_cast<unsigned>(r));
      }
      Multiplier sum(start);
      for (int32_t j = 0; j < 64; j += 8) {
        sum.mac(aie::load_v<64>(weights + i * 64 + j * 8),
                aie::load_v<64>(values + j * head_dim + c * 8));
      }
      const auto tile = sum.to_vector<float>();
      for (int32_t r = 0; r < 8; ++r) {
        aie::store_v(o + (i + r) * head_dim + c, tile.extract<8>(static_cast<unsigned>(r)));
      }
    }
  }
}

// Third stage: o = v o + P V.
//   o [64, head_dim] f32 row-major and sums [64] f32, l as it was last, are the core's own
TILE_KERNEL void steel_values(const void* p, const void* v, const void* state, void* o, void* sums,
                              int32_t head_dim, int32_t row_block, int32_t column_block,
                              int32_t tokens, int32_t offset) {
  const int32_t kind = block_kind(row_block, column_block, tokens, offset);
  if (kind == 0) return;
  const auto* factor = static_cast<const float*>(state);
  const auto* values = static_cast<const bfloat16*>(v);
  auto* last = static_cast<float*>(sums);
  auto* sums_of = static_cast<float*>(o);
  for (int32_t r = 0; r < 64; ++r) {
    last[r] = factor[64 + r];
    const float before = column_block == 0 ? 0.0f : factor[r];
    for (int32_t c = 0; c < head_dim; c += 8) {
      auto out = aie::zeros<float, 8>();
      if (column_block > 0) {
        out = aie::mul(aie::load_v<8>(sums_of + r * head_dim + c), aie::broadcast<float, 8>(before))
                  .to_vector<float>();
      }
      aie::store_v(sums_of + r * head_dim + c, out);
    }
  }
  if (kind == 1) {
    add_whole_block(p, v, sums_of, head_dim);
    return;
  }
  // On the diagonal a weight of 0 must not meet what a key that is not seen holds.
  for (int32_t r = 0; r < 64; ++r) {
    const bfloat16* weights = tiled_row(p, r, 64);
    const int32_t seen = offset + row_block * 64 + r + 1 - column_block * 64;
    for (int32_t c = 0; c < head_dim; c += 8) {
      float* out = sums_of + r * head_dim + c;
      aie::accum<accfloat, 8> sum(aie::load_v<8>(out));
      for (int32_t j = 0; j < 64 && j < seen; ++j) {
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
TILE_KERNEL void steel_finish(const void* o, const void* sums, void* y, int32_t head_dim,
                              int32_t row_block, int32_t tokens) {
  const RoundToEven even;
  const auto* source = static_cast<const float*>(o);
  const auto* total = static_cast<const float*>(sums);
  auto* target = static_cast<bfloat16*>(y);
  for (int32_t r = 0; r < 64; ++r) {
    const bool there = row_block * 64 + r < tokens && total[r] != 0.0f;
    const auto factor = aie::broadcast<float, 16>(there ? aie::inv(total[r]) : 0.0f);
    for (int32_t c = 0; c < head_dim; c += 16) {
      auto x = aie::load_v<16>(source + r * head_dim + c);
      if (!there) x = aie::zeros<float, 16>();
      aie::store_v(target + r * head_dim + c, aie::mul(x, factor).to_vector<bfloat16>());
    }
  }
}
