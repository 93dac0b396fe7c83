// The emulated instructions themselves, and the kernels on them beside float64.
#include <gmock/gmock.h>

#include <array>
#include <cmath>

#include "emulated_amx.h"
#include "emulated_tiles.h"
#include "kernel_tables.h"

namespace fasttps::cpu {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::ThrowsMessage;

// c is 0, a is 1, b is 2.
void configure(int64_t rows, int64_t quads, int64_t columns) {
  TileConfig config;
  config.set(0, rows, 4 * columns);
  config.set(1, rows, 4 * quads);
  config.set(2, quads, 4 * columns);
  EmulatedTiles::configure(config);
}

uint16_t bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// c + x . w for one row of x and one column of w, of bf16.
float dot(float c, const std::vector<float>& x, const std::vector<float>& w) {
  configure(1, std::ssize(x) / 2, 1);
  std::vector<uint16_t> of_x, of_w;
  for (const float value : x) of_x.push_back(bf16(value));
  for (const float value : w) of_w.push_back(bf16(value));
  EmulatedTiles::load<0>(&c, 64);
  EmulatedTiles::load<1>(of_x.data(), 64);
  EmulatedTiles::load<2>(of_w.data(), 4);
  EmulatedTiles::dot_bf16<0, 1, 2>();
  EmulatedTiles::store<0>(&c, 64);
  return c;
}

TEST(EmulatedTiles, AddEvenAndOddProductsApartThenTogetherThenToTheSum) {
  EXPECT_EQ(dot(1.0f, {2, 3, 5, 7}, {1, 10, 100, 1000}), 1 + 2 + 30 + 500 + 7000);
  // Even: 2^24 + 1 + 1 = 2^24, a half rounded to even each time; odd: -2^24.
  EXPECT_EQ(dot(0.0f, {0x1p12f, 0x1p12f, 1, 0, 1, 0}, {0x1p12f, -0x1p12f, 1, 0, 1, 0}), 0.0f);
  // One rounding after product and sum: 2^24 + 3 would be a half, 1.5 * 1.5 + 2^24 is not.
  EXPECT_EQ(dot(0.0f, {0x1p12f, 0, 1.5f, 0}, {0x1p12f, 0, 1.5f, 0}), 0x1p24f + 2);
  // The products are summed before c joins: 1 + 1 reaches 2^24, 1 and then 1 would not.
  EXPECT_EQ(dot(0x1p24f, {1, 1}, {1, 1}), 0x1p24f + 2);
}

TEST(EmulatedTiles, TakeAndGiveZeroForSubnormals) {
  EXPECT_EQ(dot(0.0f, {0x1p-127f, 0}, {0x1p100f, 0}), 0.0f);
  EXPECT_EQ(dot(0.0f, {0x1p-100f, 0}, {0x1p-30f, 0}), 0.0f);
  EXPECT_EQ(dot(0x1p-130f, {0, 0}, {0, 0}), 0.0f);
  EXPECT_EQ(dot(0.0f, {0x1p-126f, 0}, {1, 0}), 0x1p-126f);
}

TEST(EmulatedTiles, MultiplyBytesBySignAndWrapAround) {
  const std::array<uint8_t, 4> x = {255, 1, 128, 0}, w = {255, 2, 127, 9};
  const auto dot_bytes = [&](int32_t c, auto instruction) {
    configure(1, 1, 1);
    EmulatedTiles::load<0>(&c, 64);
    EmulatedTiles::load<1>(x.data(), 64);
    EmulatedTiles::load<2>(w.data(), 64);
    instruction();
    EmulatedTiles::store<0>(&c, 64);
    return c;
  };
  EXPECT_EQ(dot_bytes(5, EmulatedTiles::dot_s8s8<0, 1, 2>), 5 + 1 + 2 - 128 * 127);
  EXPECT_EQ(dot_bytes(5, EmulatedTiles::dot_s8u8<0, 1, 2>), 5 - 255 + 2 - 128 * 127);
  EXPECT_EQ(dot_bytes(5, EmulatedTiles::dot_u8s8<0, 1, 2>), 5 - 255 + 2 + 128 * 127);
  EXPECT_EQ(dot_bytes(INT32_MIN, EmulatedTiles::dot_s8s8<0, 1, 2>), INT32_MAX - 16252);
}

TEST(EmulatedTiles, MoveRowsOfTheirShapeAlone) {
  configure(2, 3, 4);
  const std::vector<uint8_t> from(3 * 20, 7);
  std::vector<uint8_t> to(3 * 20, 1);
  EmulatedTiles::load<1>(from.data(), 20);  // 2 rows of 12
  EmulatedTiles::store<1>(to.data(), 20);
  EXPECT_THAT(std::vector(to.begin(), to.begin() + 12), Each(7));
  EXPECT_THAT(std::vector(to.begin() + 12, to.begin() + 20), Each(1));
  EXPECT_THAT(std::vector(to.begin() + 20, to.begin() + 32), Each(7));
  EXPECT_THAT(std::vector(to.begin() + 32, to.end()), Each(1));
  EmulatedTiles::zero<1>();
  EmulatedTiles::store<1>(to.data(), 20);
  EXPECT_THAT(std::vector(to.begin(), to.begin() + 12), Each(0));
}

TEST(EmulatedTiles, RefuseWhatTheInstructionsRefuse) {
  const auto refused = [](const char* why) { return ThrowsMessage<std::logic_error>(why); };
  EmulatedTiles::release();
  EXPECT_THAT(EmulatedTiles::zero<0>, refused("a tile is used while none is configured"));
  configure(2, 3, 4);
  EXPECT_THAT(EmulatedTiles::zero<3>, refused("a tile is used that is not configured"));
  EXPECT_THAT((EmulatedTiles::dot_bf16<1, 0, 2>),
              refused("product: columns of a and rows of b differ"));
  EXPECT_THAT((EmulatedTiles::dot_bf16<2, 0, 1>), refused("product: rows of c and a differ"));
  TileConfig config;
  config.rows[0] = 17;
  config.row_bytes[0] = 64;
  EXPECT_THAT([&] { EmulatedTiles::configure(config); }, refused("ldtilecfg: too large a tile"));
  config.rows[0] = 0;
  EXPECT_THAT([&] { EmulatedTiles::configure(config); }, refused("ldtilecfg: half a tile"));
  EmulatedTiles::release();
}

int64_t rounded_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

struct Shape {
  int64_t tokens, rows, cols;
};

// Below, at and past a tile of tokens, of rows, of columns, and a block of columns and of tokens.
const Shape kShapes[] = {{1, 16, 32},  {8, 40, 33},    {9, 16, 32},   {16, 32, 64},
                         {17, 33, 30}, {31, 17, 95},   {32, 48, 512}, {33, 5, 514},
                         {48, 64, 2},  {64, 16, 1030}, {130, 35, 66}, {129, 16, 31}};

const KernelTable& kernels() { return kEmulatedAmxKernels; }

struct Bf16Weight {
  int64_t rows, cols;
  Stored values;
  std::vector<uint8_t> packed;

  Bf16Weight(int64_t r, int64_t c, uint32_t seed) : rows(r), cols(c) {
    values = store(kernels(), kBf16, normal(static_cast<size_t>(rows * cols), seed));
    const int64_t panel_bytes = kPanelRows * 2 * rounded_up(cols, 2);
    packed.resize(static_cast<size_t>(rounded_up(rows, kPanelRows) / kPanelRows * panel_bytes));
    for (int64_t p = 0; p * kPanelRows < rows; ++p) {
      kernels().pack_panel[kBf16](
          {values.bytes.data(), kBf16, cols, rows, cols, 0, p, packed.data() + p * panel_bytes});
    }
  }
};

// Activations [tokens][cols], exactly as long as they are.
struct Tokens {
  Stored values;
  std::vector<uint8_t> prepared;
  int64_t row_bytes;

  Tokens(int64_t tokens, int64_t cols, uint32_t seed) {
    values = store(kernels(), kBf16, normal(static_cast<size_t>(tokens * cols), seed));
    const int64_t padded = rounded_up(cols, 2);
    row_bytes = activation_row_bytes(kActBf16, padded);
    prepared.resize(static_cast<size_t>(tokens * row_bytes));
    for (int64_t m = 0; m < tokens; ++m) {
      kernels().prepare[kActBf16][kBf16](values.bytes.data() + 2 * m * cols, cols, padded,
                                         prepared.data() + m * row_bytes);
    }
  }
};

// w_row . x_token, and the sum of the sizes of its products.
std::array<double, 2> exact(const Bf16Weight& w, const Tokens& x, int64_t row, int64_t token) {
  std::array<double, 2> sum = {0.0, 0.0};
  for (int64_t k = 0; k < w.cols; ++k) {
    const double product = static_cast<double>(w.values.values[row * w.cols + k]) *
                           x.values.values[token * w.cols + k];
    sum[0] += product;
    sum[1] += std::abs(product);
  }
  return sum;
}

// f32 sums: a rounding for each of the 16 steps of a tile's product, for each tile of a block of
// columns, and for each block; those of a normal sum partly cancel.
constexpr double kUnit = 0x1p-21;

TEST(TiledLinear, MatchesFloat64) {
  for (const Shape& shape : kShapes) {
    const auto [tokens, rows, cols] = shape;
    const Bf16Weight weight(rows, cols, 1);
    const Tokens x(tokens, cols, 2);
    const std::vector<float> bias = normal(static_cast<size_t>(rounded_up(rows, kPanelRows)), 3);
    const int64_t stride = rows + 3;
    const std::vector<float> before = normal(static_cast<size_t>(tokens * stride), 4);
    for (const bool accumulate : {false, true}) {
      const PackedLinearKernels& linear =
          accumulate ? kernels().packed_linear_bf16_fma[0] : kernels().packed_linear[kBf16][0];
      ASSERT_EQ(linear.kind, kActBf16);
      std::vector<float> out = before;
      linear.linear({x.prepared.data(), x.row_bytes, tokens, rounded_up(cols, 2), 0,
                     weight.packed.data(), 0, rounded_up(rows, kPanelRows) / kPanelRows,
                     bias.data(), accumulate, out.data(), kF32, stride, rows});
      EXPECT_FALSE(emulated_tiles_are_configured());
      for (int64_t m = 0; m < tokens; ++m) {
        for (int64_t i = 0; i < stride; ++i) {
          const float was = before[m * stride + i], got = out[m * stride + i];
          if (i >= rows) {
            EXPECT_EQ(got, was) << "past the last row";
            continue;
          }
          const auto [product, size] = exact(weight, x, i, m);
          const double wanted = product + bias[i] + (accumulate ? was : 0.0f);
          ASSERT_NEAR(got, wanted, kUnit * (size + std::abs(bias[i]) + std::abs(was)))
              << tokens << " tokens, " << rows << " x " << cols << ": " << m << ", " << i;
        }
      }
    }
  }
}

TEST(TiledLinear, GateUpMatchesFloat64) {
  for (const Shape& shape : kShapes) {
    const auto [tokens, rows, cols] = shape;
    const Bf16Weight gate(rows, cols, 5), up(rows, cols, 6);
    const Tokens x(tokens, cols, 7);
    const int64_t panels = rounded_up(rows, kPanelRows) / kPanelRows;
    const auto panel_bytes = std::ssize(gate.packed) / panels;
    std::vector<uint8_t> both;
    for (int64_t p = 0; p < panels; ++p) {
      for (const Bf16Weight* half : {&gate, &up}) {
        const auto panel = half->packed.begin() + p * panel_bytes;
        both.insert(both.end(), panel, panel + panel_bytes);
      }
    }
    std::vector<float> out(static_cast<size_t>(tokens * rows), NAN);
    kernels().packed_linear[kBf16][1].gate_up(
        {x.prepared.data(), x.row_bytes, tokens, rounded_up(cols, 2), 0, both.data(), 0, panels,
         nullptr, nullptr, kSilu, out.data(), kF32, rows, rows});
    EXPECT_FALSE(emulated_tiles_are_configured());
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t i = 0; i < rows; ++i) {
        const auto [g, g_size] = exact(gate, x, i, m);
        const auto [u, u_size] = exact(up, x, i, m);
        const double silu = g / (1.0 + std::exp(-g));
        // |silu'| < 1.1; silu itself is exact to 4 roundings.
        const double bound = kUnit * (1.1 * g_size * std::abs(u) + std::abs(silu) * u_size) +
                             0x1p-20 * std::abs(silu * u);
        ASSERT_NEAR(out[m * rows + i], silu * u, bound)
            << tokens << " tokens, " << rows << " x " << cols << ": " << m << ", " << i;
      }
    }
  }
}

// Formats of quantised weights: columns and bytes of a group, and bytes after the last.
struct QuantizedCase {
  int format;
  int64_t group_size, group_cols, group_bytes, tail_bytes;
};
const QuantizedCase kQuantizedCases[] = {
    {3, 0, 32, 512, 64},      {4, 64, 64, 512 + 32, 0},        {5, 32, 32, 256 + 64, 0},
    {6, 32, 32, 512 + 32, 0}, {7, 0, 256, 2048 + 256 + 64, 0}, {8, 0, 256, 3072 + 256 + 32, 0},
    {9, 64, 64, 512 + 48, 0}};

// Integer sums are exact, and f32 ones are added in the same order as by vectors.
TEST(TiledLinear, EqualsVectorsWithInt8Activations) {
  std::mt19937 generator(10);
  for (const QuantizedCase& c : kQuantizedCases) {
    for (const auto& [tokens, rows, groups] :
         {std::array<int64_t, 3>{9, 16, 1}, {16, 33, 3}, {31, 48, 2}, {40, 16, 17}, {131, 32, 1}}) {
      const int64_t cols = groups * c.group_cols;
      const int64_t panels = rounded_up(rows, kPanelRows) / kPanelRows;
      // Any bytes are quants; without the highest bit of their exponents all scales are finite.
      std::vector<uint8_t> packed(
          static_cast<size_t>(2 * panels * (groups * c.group_bytes + c.tail_bytes)));
      for (uint8_t& byte : packed) byte = static_cast<uint8_t>(generator()) & 0xbf;
      const std::vector<float> x = normal(static_cast<size_t>(tokens * cols), 11);
      const int64_t row_bytes = activation_row_bytes(kActInt8, cols);
      std::vector<uint8_t> prepared(static_cast<size_t>(tokens * row_bytes));
      for (int64_t m = 0; m < tokens; ++m) {
        kernels().prepare[kActInt8][kF32](x.data() + m * cols, cols, cols,
                                          prepared.data() + m * row_bytes);
      }
      const int64_t products_before = emulated_tile_products();
      std::vector<float> linear[2], gate_up[2];
      for (const int tiled : {0, 1}) {
        const PackedLinearKernels& table =
            (tiled ? kernels() : kScalarKernels).packed_linear[c.format][1];
        ASSERT_EQ(table.kind, kActInt8);
        linear[tiled].resize(static_cast<size_t>(tokens * rows));
        table.linear({prepared.data(), row_bytes, tokens, cols, c.group_size, packed.data(), 0,
                      panels, nullptr, false, linear[tiled].data(), kF32, rows, rows});
        gate_up[tiled].resize(static_cast<size_t>(tokens * rows));
        table.gate_up({prepared.data(), row_bytes, tokens, cols, c.group_size, packed.data(), 0,
                       panels, nullptr, nullptr, kGelu, gate_up[tiled].data(), kF32, rows, rows});
        EXPECT_FALSE(emulated_tiles_are_configured());
      }
      EXPECT_GT(emulated_tile_products(), products_before);
      EXPECT_EQ(linear[1], linear[0]) << "format " << c.format << ", " << tokens << " tokens";
      EXPECT_EQ(gate_up[1], gate_up[0]) << "format " << c.format << ", " << tokens << " tokens";
    }
  }
}

TEST(TiledLinear, LeavesFewTokensToVectors) {
  const Bf16Weight weight(16, 64, 12);
  for (const int64_t tokens : {1, 8, 9, 33}) {
    const Tokens x(tokens, 64, 13);
    std::vector<float> out(static_cast<size_t>(16 * tokens));
    const int64_t before = emulated_tile_products();
    kernels().packed_linear[kBf16][0].linear({x.prepared.data(), x.row_bytes, tokens, 64, 0,
                                              weight.packed.data(), 0, 1, nullptr, false,
                                              out.data(), kF32, 16, 16});
    const int64_t token_tiles = tokens < 9 ? 0 : rounded_up(tokens, 16) / 16;
    EXPECT_EQ(emulated_tile_products() - before, 2 * token_tiles) << tokens;
  }
}

// A token's sums do not depend on the others: neither their number nor a NaN among them.
TEST(TiledLinear, KeepsTokensApart) {
  const int64_t tokens = 45, rows = 32, cols = 70;
  const Bf16Weight weight(rows, cols, 8);
  Tokens x(tokens, cols, 9);
  const auto run = [&](int64_t first, int64_t count) {
    std::vector<float> out(static_cast<size_t>(count * rows));
    kernels().packed_linear[kBf16][0].linear(
        {x.prepared.data() + first * x.row_bytes, x.row_bytes, count, cols, 0, weight.packed.data(),
         0, rows / kPanelRows, nullptr, false, out.data(), kF32, rows, rows});
    return out;
  };
  const std::vector<float> all = run(0, tokens), some = run(20, 20);
  EXPECT_THAT(some, testing::ElementsAreArray(all.begin() + 20 * rows, all.begin() + 40 * rows));
  const uint16_t nan = 0x7fc0;
  std::memcpy(x.prepared.data() + 17 * x.row_bytes + 2 * 69, &nan, 2);
  const std::vector<float> with_nan = run(0, tokens);
  for (int64_t i = 0; i < tokens * rows; ++i) {
    if (i / rows == 17) {
      EXPECT_TRUE(std::isnan(with_nan[i]));
    } else {
      EXPECT_EQ(with_nan[i], all[i]);
    }
  }
}

}  // namespace
}  // namespace fasttps::cpu
