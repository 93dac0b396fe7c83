// Included after all.h where there are tile registers. Products of packed weights for many tokens.
#include "tiles.h"

namespace fasttps::cpu {
namespace {

// Fewer tokens than this leave most rows of a tile empty: then vectors are used.
inline constexpr int64_t kFewestTiledTokens = 9;

// A tile of weights is 16 rows of 4 bytes of columns of a panel, just as it is packed. Up to two
// tiles of tokens meet two of panels, so that each serves twice:
//   0 = 4 . 6   1 = 4 . 7   sums of the first 16 tokens by panel
//   2 = 5 . 6   3 = 5 . 7   of the others
template <class Tiles>
inline void configure_products(int64_t first_tokens, int64_t more_tokens, int64_t weight_rows) {
  const int64_t rows[8] = {first_tokens, first_tokens, more_tokens, more_tokens,
                           first_tokens, more_tokens,  weight_rows, weight_rows};
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, rows[tile], kTileRowBytes);
  Tiles::configure(config);
}

// Calls add(first token, tokens of tiles 4 and 5) with the tiles configured for them.
template <class Tiles, class Add>
inline void for_token_tiles(int64_t tokens, const Add& add) {
  int64_t first = 0, more = 0;
  for (int64_t token = 0; token < tokens; token += 2 * kTileRows) {
    const int64_t left = tokens - token;
    const int64_t now_first = left < kTileRows ? left : kTileRows;
    const int64_t rest = left - now_first, now_more = rest < kTileRows ? rest : kTileRows;
    if (now_first != first || now_more != more) {
      first = now_first;
      more = now_more;
      configure_products<Tiles>(first, more, kTileRows);
    }
    add(token, first + more);
  }
}

template <class VecType, class Tiles>
struct TiledBf16Product {
  using Vec = VecType;
  static constexpr ActivationKind kKind = kActBf16;
  static constexpr bool kTiled = true;
  static constexpr int64_t kBlock = 512;  // of two panels: two thirds of the first-level cache
  static constexpr int64_t kTileCols = 32;
  static constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;

  static int64_t panel_bytes(int64_t cols, int64_t /*group_size*/) { return 2 * cols * kPanelRows; }

  template <int kPanels>
  static void add_all(const TileInput& in, int64_t tokens, int64_t begin, int64_t end,
                      float* totals) {
    const char* panels = in.panels + 2 * begin * kPanelRows;
    for_token_tiles<Tiles>(tokens, [&](int64_t token, int64_t count) {
      const char* x = in.activation + token * in.activation_bytes + 2 * begin;
      alignas(64) float sums[2 * kTileRows * kPanels * kPanelRows];
      if (count > kTileRows) {
        products<2, kPanels>(in, x, count, panels, end - begin, sums);
      } else {
        products<1, kPanels>(in, x, count, panels, end - begin, sums);
      }
      float* to = totals + token * kPanels * kPanelRows;
      for (int64_t i = 0; i < count * kPanels * kPanelRows; i += Vec::kLanes) {
        (Vec::load(to + i) + Vec::load(sums + i)).store(to + i);
      }
    });
  }

  // sums[token][panel][16] = cols columns of the panels . those of x.
  template <int kTokenTiles, int kPanels>
  static void products(const TileInput& in, const char* x, int64_t tokens, const char* panels,
                       int64_t cols, float* sums) {
    Tiles::template zero<0>();
    if constexpr (kPanels == 2) Tiles::template zero<1>();
    if constexpr (kTokenTiles == 2) Tiles::template zero<2>();
    if constexpr (kTokenTiles == 2 && kPanels == 2) Tiles::template zero<3>();
    int64_t col = 0;
    for (; col + kTileCols <= cols; col += kTileCols) {
      step<kTokenTiles, kPanels>(x, in.activation_bytes, panels, in.panel_bytes);
      x += kTileRowBytes;
      panels += kTileBytes;
    }
    if (col < cols) {  // the last columns, and zeros after them
      alignas(64) char some_x[2 * kTileBytes], some_panels[2 * kTileBytes];
      for (int64_t m = 0; m < tokens; ++m) {
        Vec::copy_bytes(x + m * in.activation_bytes, 2 * (cols - col), some_x + m * kTileRowBytes);
      }
      for (int64_t row = 0; row < kTileRows; ++row) {
        const int64_t bytes = 2 * row < cols - col ? kTileRowBytes : 0;
        for (int64_t p = 0; p < kPanels; ++p) {
          const int64_t at = row * kTileRowBytes;
          Vec::copy_bytes(panels + p * in.panel_bytes + at, bytes,
                          some_panels + p * kTileBytes + at);
        }
      }
      step<kTokenTiles, kPanels>(some_x, kTileRowBytes, some_panels, kTileBytes);
    }
    constexpr int64_t kStride = kPanels * kPanelRows * sizeof(float);
    float* more = sums + kTileRows * kPanels * kPanelRows;
    Tiles::template store<0>(sums, kStride);
    if constexpr (kPanels == 2) Tiles::template store<1>(sums + kPanelRows, kStride);
    if constexpr (kTokenTiles == 2) Tiles::template store<2>(more, kStride);
    if constexpr (kTokenTiles == 2 && kPanels == 2) {
      Tiles::template store<3>(more + kPanelRows, kStride);
    }
  }

  template <int kTokenTiles, int kPanels>
  static void step(const char* x, int64_t x_bytes, const char* panels, int64_t panel_bytes) {
    Tiles::template load<6>(panels, kTileRowBytes);
    Tiles::template load<4>(x, x_bytes);
    Tiles::template dot_bf16<0, 4, 6>();
    if constexpr (kPanels == 2) {
      Tiles::template load<7>(panels + panel_bytes, kTileRowBytes);
      Tiles::template dot_bf16<1, 4, 7>();
    }
    if constexpr (kTokenTiles == 2) {
      Tiles::template load<5>(x + kTileRows * x_bytes, x_bytes);
      Tiles::template dot_bf16<2, 5, 6>();
      if constexpr (kPanels == 2) Tiles::template dot_bf16<3, 5, 7>();
    }
  }
};

// Few: a product of the same kind for few tokens. Tiles are in use only inside a task.
template <class Few, class Many, class Tiles>
void tiled_linear(const LinearTask& task) {
  if (task.tokens < kFewestTiledTokens) return linear<Few>(task);
  linear<Many>(task);
  Tiles::release();
}
template <class Few, class Many, class Tiles>
void tiled_gate_up(const GateUpTask& task) {
  if (task.tokens < kFewestTiledTokens) return gate_up<Few>(task);
  gate_up<Many>(task);
  Tiles::release();
}

template <class Few, class Many, class Tiles>
constexpr PackedLinearKernels tiled_linear_kernels() {
  static_assert(Few::kKind == Many::kKind);
  return {Many::kKind, tiled_linear<Few, Many, Tiles>, tiled_gate_up<Few, Many, Tiles>};
}

// `table` with what tiles can do faster. Requires dot_bf16_pairs of Vec.
template <class Vec, class Tiles>
constexpr KernelTable with_tiles(KernelTable table) {
  using Bf16Few = SteppedProduct<Bf16DotStep<Vec>>;
  constexpr auto bf16 = tiled_linear_kernels<Bf16Few, TiledBf16Product<Vec, Tiles>, Tiles>();
  table.packed_linear[kBf16] = {{bf16, bf16}};
  return table;
}

}  // namespace
}  // namespace fasttps::cpu
