// Included after all.h where there are tile registers. Products of packed weights for many tokens.
#include "tiles.h"

namespace fasttps::cpu {
namespace {

// Fewer tokens than this leave most rows of a tile empty: then vectors are used.
inline constexpr int64_t kFewestTiledTokens = 9;

// Rows of a tile of weights are 4 bytes of columns of the 16 rows of a panel, just as it is packed.
// Up to two tiles of tokens meet two of panels, so that each serves twice:
//   0 = 4 . 6   1 = 4 . 7   sums of the first 16 tokens by panel
//   2 = 5 . 6   3 = 5 . 7   of the others
// Calls add(first token, tokens of tiles 4 and 5) with the tiles configured for them and for
// x_row_bytes of columns.
template <class Tiles, class Add>
inline void for_token_tiles(int64_t tokens, int64_t x_row_bytes, const Add& add) {
  int64_t first = 0, more = 0;
  for (int64_t token = 0; token < tokens; token += 2 * kTileRows) {
    const int64_t left = tokens - token;
    const int64_t now_first = left < kTileRows ? left : kTileRows;
    const int64_t rest = left - now_first, now_more = rest < kTileRows ? rest : kTileRows;
    if (now_first != first || now_more != more) {
      first = now_first;
      more = now_more;
      TileConfig config;
      for (int pair = 0; pair < 2; ++pair) {
        config.set(pair, first, kTileRowBytes);
        config.set(2 + pair, more, kTileRowBytes);
        config.set(4 + pair, pair == 0 ? first : more, x_row_bytes);
        config.set(6 + pair, x_row_bytes / 4, kTileRowBytes);
      }
      Tiles::configure(config);
    }
    add(token, first + more);
  }
}

template <class Tiles, int kTokenTiles, int kPanels>
inline void zero_sums() {
  Tiles::template zero<0>();
  if constexpr (kPanels == 2) Tiles::template zero<1>();
  if constexpr (kTokenTiles == 2) Tiles::template zero<2>();
  if constexpr (kTokenTiles == 2 && kPanels == 2) Tiles::template zero<3>();
}

// The sums of a token lie `row` apart: [panel][16], of 4 bytes.
template <class Tiles, int kTokenTiles, int kPanels, class Sum>
inline void store_sums(Sum* sums, int64_t row = kPanels * kPanelRows) {
  const int64_t stride = row * static_cast<int64_t>(sizeof(Sum));
  Sum* more = sums + kTileRows * row;
  Tiles::template store<0>(sums, stride);
  if constexpr (kPanels == 2) Tiles::template store<1>(sums + kPanelRows, stride);
  if constexpr (kTokenTiles == 2) Tiles::template store<2>(more, stride);
  if constexpr (kTokenTiles == 2 && kPanels == 2) {
    Tiles::template store<3>(more + kPanelRows, stride);
  }
}

// Adds the products of the tiles at x and at the panels, whose rows lie x_bytes and panel_row_bytes
// apart.
template <class Tiles, int kTokenTiles, int kPanels, class Dot>
inline void add_products(const void* x, int64_t x_bytes, const void* const* panels,
                         int64_t panel_row_bytes, const Dot& dot) {
  Tiles::template load<6>(panels[0], panel_row_bytes);
  Tiles::template load<4>(x, x_bytes);
  dot.template operator()<0, 4, 6>();
  if constexpr (kPanels == 2) {
    Tiles::template load<7>(panels[1], panel_row_bytes);
    dot.template operator()<1, 4, 7>();
  }
  if constexpr (kTokenTiles == 2) {
    Tiles::template load<5>(static_cast<const char*>(x) + kTileRows * x_bytes, x_bytes);
    dot.template operator()<2, 5, 6>();
    if constexpr (kPanels == 2) dot.template operator()<3, 5, 7>();
  }
}

template <class VecType, class Tiles>
struct TiledBf16Product {
  using Vec = VecType;
  static constexpr ActivationKind kKind = kActBf16;
  static constexpr bool kTiled = true;
  static constexpr int kFewTokens = 0;
  static constexpr int64_t kBlock = 512;  // of two panels: two thirds of the first-level cache
  static constexpr int64_t kTileCols = 32;
  static constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;

  static int64_t panel_bytes(int64_t cols, int64_t /*group_size*/) { return 2 * cols * kPanelRows; }

  template <int kPanels>
  static void add_all(const TileInput& in, int64_t tokens, int64_t begin, int64_t end,
                      float* totals) {
    const char* panels = in.panels + 2 * begin * kPanelRows;
    for_token_tiles<Tiles>(tokens, kTileRowBytes, [&](int64_t token, int64_t count) {
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
    zero_sums<Tiles, kTokenTiles, kPanels>();
    int64_t col = 0;
    for (; col + kTileCols <= cols; col += kTileCols) {
      step<kTokenTiles, kPanels>(x, in.activation_bytes, panels, in.panel_stride);
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
          Vec::copy_bytes(panels + p * in.panel_stride + at, bytes,
                          some_panels + p * kTileBytes + at);
        }
      }
      step<kTokenTiles, kPanels>(some_x, kTileRowBytes, some_panels, kTileBytes);
    }
    store_sums<Tiles, kTokenTiles, kPanels>(sums);
  }

  template <int kTokenTiles, int kPanels>
  static void step(const char* x, int64_t x_bytes, const char* panels, int64_t panel_bytes) {
    const void* const of_panels[] = {panels, panels + (kPanels - 1) * panel_bytes};
    add_products<Tiles, kTokenTiles, kPanels>(
        x, x_bytes, of_panels, kTileRowBytes,
        []<int c, int a, int b>() { Tiles::template dot_bf16<c, a, b>(); });
  }
};

// Int8Product with its integer sums from tiles: the same sums in the same order.
template <class VecType, class Tiles, class Weight>
struct TiledInt8Product : QuantizedProduct<VecType, Weight> {
  using Base = QuantizedProduct<VecType, Weight>;
  using typename Base::Int;
  using typename Base::Vec;
  static constexpr ActivationKind kKind = kActInt8;
  static constexpr bool kTiled = true;
  static constexpr int kSub = Weight::kSubBlocks;

  template <int kPanels>
  static void add_all(TileInput in, int64_t tokens, int64_t begin, int64_t end, float* totals) {
    const char* activation = in.activation;
    for_token_tiles<Tiles>(tokens, kRunCols / kSub, [&](int64_t token, int64_t count) {
      in.activation = activation + token * in.activation_bytes;
      float* to = totals + token * kPanels * kPanelRows;
      if (count > kTileRows) {
        add_some<2, kPanels>(in, count, begin, end, to);
      } else {
        add_some<1, kPanels>(in, count, begin, end, to);
      }
    });
  }

  template <int kTokenTiles, int kPanels>
  static void add_some(const TileInput& in, int64_t tokens, int64_t begin, int64_t end,
                       float* totals) {
    constexpr int64_t kRow = kPanels * kPanelRows;
    const int64_t group_cols = Weight::group_cols(in.group_size);
    const int64_t group_bytes = Weight::group_bytes(group_cols);
    const auto* x = reinterpret_cast<const Int8Run*>(in.activation) + begin / kRunCols;
    const auto* panels = reinterpret_cast<const uint8_t*>(in.panels);
    const uint8_t* group = panels + begin / group_cols * group_bytes;
    alignas(64) float acc[kTokenTiles * kTileRows * kRow] = {};
    for (int64_t col = begin; col < end; col += group_cols, group += group_bytes) {
      for (int64_t run = 0; run < group_cols / kRunCols; ++run, ++x) {
        alignas(64) int32_t sums[kSub][kTokenTiles * kTileRows * kRow];
        alignas(64) uint8_t unpacked[kPanels][kByteRunBytes];
        const uint8_t* bytes[kPanels];
        for (int p = 0; p < kPanels; ++p) {
          bytes[p] = run_bytes(group + p * in.panel_stride, group_cols, run, unpacked[p]);
        }
        for (int k = 0; k < kSub; ++k) {
          const int64_t at = k * kByteRunBytes / kSub;
          const void* const of_panels[] = {bytes[0] + at, bytes[kPanels - 1] + at};
          zero_sums<Tiles, kTokenTiles, kPanels>();
          add_products<Tiles, kTokenTiles, kPanels>(
              x->q + k * kRunCols / kSub, in.activation_bytes, of_panels, kTileRowBytes,
              []<int c, int a, int b>() { Tiles::template dot_s8u8<c, a, b>(); });
          store_sums<Tiles, kTokenTiles, kPanels>(sums[k]);
        }
        for (int64_t i = 0; i < kRow; i += Vec::kLanes) {
          const auto scales = Weight::template scales<Vec>(group + i / kPanelRows * in.panel_stride,
                                                           group_cols, run, i % kPanelRows);
          const int32_t* const of_rows[] = {sums[0] + i, sums[kSub - 1] + i};
          add_run(of_rows, kRow, scales, x, in.activation_bytes, tokens, acc + i);
        }
      }
    }
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t i = 0; i < kRow; i += Vec::kLanes) {
        Base::add_to(totals + m * kRow + i, Vec::load(acc + m * kRow + i),
                     panels + i / kPanelRows * in.panel_stride, in, i % kPanelRows);
      }
    }
  }

  // The quants of a run: [8][16 rows][4] bytes.
  static const uint8_t* run_bytes(const uint8_t* group, int64_t group_cols, int64_t run,
                                  uint8_t* unpacked) {
    // A run of bytes lies in the panel as the tile wants it.
    constexpr int64_t kGroup = Weight::group_cols(kRunCols);
    if constexpr (Weight::group_bytes(kGroup) >= kGroup / kRunCols * kByteRunBytes) {
      return group + run * kByteRunBytes;
    } else {
      for (int j = 0; j < 4; ++j) {
        for (int64_t lane = 0; lane < kPanelRows; lane += Vec::kLanes) {
          Int low, high;
          Weight::quad(group, group_cols, run, lane, j, low, high);
          __builtin_memcpy(unpacked + 64 * j + 4 * lane, &low, sizeof low);
          __builtin_memcpy(unpacked + 64 * (j + 4) + 4 * lane, &high, sizeof high);
        }
      }
      return unpacked;
    }
  }

  // acc[token] += the products of a run, for one vector of rows; sums[sub-block][token]. Tokens lie
  // `row` apart.
  static void add_run(const int32_t* const* sums, int64_t row, const RunScales<Vec>& scales,
                      const Int8Run* x, int64_t x_bytes, int64_t tokens, float* acc) {
    for (int64_t m = 0; m < tokens; ++m) {
      Vec sum = Vec::load(acc + m * row);
      const auto& of =
          *reinterpret_cast<const Int8Run*>(reinterpret_cast<const char*>(x) + m * x_bytes);
      const Vec scale = Vec::set(of.scale);
      for (int k = 0; k < kSub; ++k) {
        // Both are below 2^24.
        const auto start = static_cast<float>(of.template start<Weight::kOffset>(k));
        const Vec products = to_float(Int::load(sums[k] + m * row)) + Vec::set(start);
        if constexpr (Weight::kRowScale) {
          sum = fmadd(products, scale, sum);
        } else {
          sum = fmadd(products * scale, scales.scale[k], sum);
        }
      }
      if constexpr (Weight::kHasMin) sum = fmadd(Vec::set(of.sum), scales.shift[0], sum);
      sum.store(acc + m * row);
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

template <class Vec, class Tiles, class Weight>
constexpr PackedLinearRow tiled_quantized_kernels(const PackedLinearRow& row) {
  return {{row[0], tiled_linear_kernels<Int8Product<Vec, Weight>,
                                        TiledInt8Product<Vec, Tiles, Weight>, Tiles>()}};
}

// `table` with what tiles can do faster. Requires dot_bf16_pairs of Vec.
template <class Vec, class Tiles>
constexpr KernelTable with_tiles(KernelTable table) {
  using Bf16Few = SteppedProduct<Bf16DotStep<Vec>>;
  constexpr auto bf16 = tiled_linear_kernels<Bf16Few, TiledBf16Product<Vec, Tiles>, Tiles>();
  PackedLinearRow* rows = table.packed_linear;  // by format
  rows[1] = {{bf16, bf16}};
  table.packed_linear_bf16_fma = rows[1];  // tiles are faster than either way of vectors
  rows[3] = tiled_quantized_kernels<Vec, Tiles, Int8Weight>(rows[3]);
  rows[4] = tiled_quantized_kernels<Vec, Tiles, Int4Weight>(rows[4]);
  rows[5] = tiled_quantized_kernels<Vec, Tiles, Int4MinWeight>(rows[5]);
  rows[6] = tiled_quantized_kernels<Vec, Tiles, Int8GroupWeight>(rows[6]);
  rows[7] = tiled_quantized_kernels<Vec, Tiles, Q4KWeight>(rows[7]);
  rows[8] = tiled_quantized_kernels<Vec, Tiles, Q6KWeight>(rows[8]);
  rows[9] = tiled_quantized_kernels<Vec, Tiles, Int4ZeroWeight>(rows[9]);
  return table;
}

}  // namespace
}  // namespace fasttps::cpu
