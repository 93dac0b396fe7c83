// Included after all.h and tiled_linear.h. causal_prefill of bf16 caches on tile registers.
namespace fasttps::cpu {
namespace {

// Keys, or elements of values, are the rows of the first factor; query rows are the columns of the
// second. The steps between the two products are PairProduct's.
// Requires head_dim and the stride of the state to be multiples of 16.
template <class VecType, class Tiles>
struct TiledPairProduct : PairProduct<VecType, Bf16> {
  using Vec = VecType;
  using Base = PairProduct<Vec, Bf16>;
  using Base::s;
  using Base::task;
  static constexpr int64_t kKeyPairs = kKeyBlock / 2;

  TiledPairProduct(const AttentionTask& t, const PrefillState<Vec>& state) : Base(t, state) {
    // Past the last key, weights meet values that are zero: they must be finite.
    for (int64_t i = 0; i < kKeyPairs * s.stride; ++i) Base::weights[i] = 0;
  }

  void scores(const KeyBlock& block) const {
    const int64_t step_bytes = task.head_dim % 32 == 0 ? kTileRowBytes : kTileRowBytes / 2;
    multiply(
        block.count, key_row<Bf16>(task, block.position), 2 * task.k_stride,
        2 * task.head_dim / step_bytes, step_bytes, Base::query,
        [&](int64_t j, int64_t r, auto store) { store(s.scores + j * s.stride + r, s.stride); });
  }

  void values(const KeyBlock& block) const {
    Base::pair_values(block);
    auto* transposed = reinterpret_cast<uint32_t*>(Base::key);  // [head_dim][kKeyPairs]
    transpose<Vec>(reinterpret_cast<const float*>(Base::value), task.padded_dim,
                   (block.count + 1) / 2, kKeyPairs, task.head_dim,
                   reinterpret_cast<float*>(transposed), kKeyPairs);
    multiply(task.head_dim, transposed, 4 * kKeyPairs, 2, kTileRowBytes, Base::weights,
             [&](int64_t d, int64_t r, auto store) {
               constexpr int64_t kRows = 2 * kTileRows;
               alignas(64) float sums[kRows * kRows];
               store(sums, kRows);
               const int64_t d_end = d + kRows < task.head_dim ? d + kRows : task.head_dim;
               const int64_t r_end = r + kRows < s.stride ? r + kRows : s.stride;
               for (int64_t row = d; row < d_end; ++row) {
                 for (int64_t at = r; at < r_end; at += Vec::kLanes) {
                   float* to = s.out + row * s.stride + at;
                   const Vec sum = Vec::load(sums + (row - d) * kRows + at - r);
                   fmadd(Vec::load(to), Vec::load(s.rescale + at), sum).store(to);
                 }
               }
             });
  }

 private:
  // For blocks of up to 32 x 32: finish(first row, first column, store), where store(to, stride)
  // puts a . b there. a: [rows][steps * step_bytes], rows a_bytes apart; b: pairs, [..][s.stride].
  template <class Finish>
  void multiply(int64_t rows, const void* a, int64_t a_bytes, int64_t steps, int64_t step_bytes,
                const uint32_t* b, const Finish& finish) const {
    for_token_tiles<Tiles>(rows, step_bytes, [&](int64_t row, int64_t count) {
      const char* of_rows = static_cast<const char*>(a) + row * a_bytes;
      for (int64_t column = 0; column < s.stride; column += 2 * kTileRows) {
        const auto block = [&]<int kRowTiles, int kColumnTiles>() {
          zero_sums<Tiles, kRowTiles, kColumnTiles>();
          for (int64_t i = 0; i < steps; ++i) {
            const uint32_t* pairs = b + i * step_bytes / 4 * s.stride + column;
            const void* const columns[] = {pairs, pairs + (kColumnTiles - 1) * kTileRows};
            add_products<Tiles, kRowTiles, kColumnTiles>(
                of_rows + i * step_bytes, a_bytes, columns, 4 * s.stride,
                []<int x, int y, int z>() { Tiles::template dot_bf16<x, y, z>(); });
          }
          finish(row, column, [](float* to, int64_t stride) {
            store_sums<Tiles, kRowTiles, kColumnTiles>(to, stride);
          });
        };
        const bool wide = column + kTileRows < s.stride;
        if (count > kTileRows) {
          wide ? block.template operator()<2, 2>() : block.template operator()<2, 1>();
        } else {
          wide ? block.template operator()<1, 2>() : block.template operator()<1, 1>();
        }
      }
    });
  }
};

// See AttentionTask. kOtherwise: for what the tiles cannot do, or may not.
template <class Vec, class Tiles, void (*kOtherwise)(const AttentionTask&)>
void tiled_causal_prefill(const AttentionTask& task) {
  const int64_t stride = (task.rows + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes;
  if (!(task.bf16_factor > 0.0f) || task.head_dim % 16 != 0 || stride % kTileRows != 0) {
    return kOtherwise(task);
  }
  prefill_with<Vec, Bf16, TiledPairProduct<Vec, Tiles>>(task);
  Tiles::release();
}

// Whichever product bf16 has elsewhere, tiles are faster.
template <class Vec, class Tiles>
constexpr KernelTable with_tiled_prefill(KernelTable table) {
  table.causal_prefill[kBf16] = tiled_causal_prefill<Vec, Tiles, causal_prefill<Vec, Bf16>>;
  table.causal_prefill_bf16[kBf16] =
      tiled_causal_prefill<Vec, Tiles, causal_prefill_bf16<Vec, Bf16>>;
  return table;
}

}  // namespace
}  // namespace fasttps::cpu
