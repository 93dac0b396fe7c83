#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "npu/kernel_list.h"

namespace fasttps::npu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kLog2e = 1.4426950408889634;

uint16_t to_bf16(float x) {
  if (x != x) return 0x7fc0;
  const uint32_t u = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

struct Bf16 : std::vector<uint16_t> {
  explicit Bf16(size_t n) : std::vector<uint16_t>(n) {}
  Bf16(size_t n, unsigned seed, float scale = 1) : std::vector<uint16_t>(n) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, scale);
    for (auto& x : *this) x = to_bf16(normal(random));
  }
  double operator()(size_t i) const { return from_bf16(at(i)); }
};
using F32 = std::vector<float>;

// Runs with each memory argument in an allocation of exactly the bytes that the kernel says it
// touches, so that ASan sees one byte more, and between guard bytes, which sees it without.
struct Runner {
  Numerics numerics;
  const Kernel& k;
  std::vector<KernelValue> values;
  std::vector<std::pair<void*, size_t>> memories;
  Runner(Numerics n, const char* name) : numerics(n), k(kernel(name)) {}
  template <class T>
  Runner& memory(T& v) {
    values.push_back({.memory = v.data()});
    memories.push_back({v.data(), v.size() * sizeof(v[0])});
    return *this;
  }
  Runner& number(int64_t n) {
    KernelValue value{.memory = nullptr};
    value.number = n;
    values.push_back(value);
    return *this;
  }
  void run() {
    constexpr size_t kGuard = 64;
    const auto bytes = k.memory_bytes(values);
    ASSERT_EQ(bytes.size(), memories.size());
    std::vector<std::vector<char>> guarded;
    std::vector<char*> exact;
    size_t next = 0;
    auto called = values;
    for (size_t i = 0; i < values.size(); ++i) {
      if (k.arguments[i] != ArgumentKind::kMemory) continue;
      const size_t n = bytes[next];
      ASSERT_LE(n, memories[next].second) << k.name << " memory " << next;
      guarded.emplace_back(n + 2 * kGuard, 0x5a);
      std::memcpy(guarded.back().data() + kGuard, memories[next].first, n);
      called[i].memory = guarded.back().data() + kGuard;
      ++next;
    }
    auto sharp = values;
    next = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      if (k.arguments[i] != ArgumentKind::kMemory) continue;
      exact.push_back(new char[bytes[next]]);
      std::memcpy(exact.back(), memories[next].first, bytes[next]);
      sharp[i].memory = exact.back();
      ++next;
    }
    k.run(numerics, called);
    k.run(numerics, sharp);
    for (size_t m = 0; m < guarded.size(); ++m) {
      for (size_t b = 0; b < kGuard; ++b) {
        EXPECT_EQ(guarded[m][b], 0x5a);
        EXPECT_EQ(guarded[m][guarded[m].size() - 1 - b], 0x5a) << k.name << " memory " << m;
      }
      std::memcpy(memories[m].first, guarded[m].data() + kGuard, bytes[m]);
      delete[] exact[m];
    }
  }
};

class Kernels : public testing::TestWithParam<int> {
 protected:
  Numerics numerics() const {
    return {GetParam() == 0 ? Generation::kAie2 : Generation::kAie2p, GetParam() == 2};
  }
  // Relative to the sum of |a b|: f32 sums of at most 2048 terms stay under 2^-13; a bfp16 mantissa
  // is off by half a unit, 2^-7 of its block's largest, in each of two factors.
  double product_error() const { return GetParam() == 2 ? 0.06 : 1.3e-4; }
  Runner on(const char* name) const { return {numerics(), name}; }
};
INSTANTIATE_TEST_SUITE_P(Cores, Kernels, testing::Values(0, 1, 2));

int64_t bits(double x) { return std::bit_cast<int32_t>(static_cast<float>(x)); }

TEST_P(Kernels, GemvOfEachFormat) {
  constexpr int m = 6, k = 256;
  Bf16 w(m * k, 1), x(k, 2);
  F32 y(m, 100);
  on("gemv").memory(w).memory(x).memory(y).number(m).number(k).number(0).run();
  for (int r = 0; r < m; ++r) {
    double exact = 100, size = 100;
    for (int i = 0; i < k; ++i)
      exact += w(r * k + i) * x(i), size += std::fabs(w(r * k + i) * x(i));
    EXPECT_NEAR(y[r], exact, 1e-5 * size);
  }
  for (int group : {32, 128}) {
    const int groups = k / group;
    std::vector<uint8_t> tile(m * k + m * groups * 2);
    std::mt19937 random(3);
    for (int i = 0; i < m * k; ++i) tile[i] = static_cast<uint8_t>(random());
    Bf16 scales(m * groups, 4), zeros(m * groups, 5, 4);
    std::memcpy(tile.data() + m * k, scales.data(), scales.size() * 2);
    on("gemv_int8")
        .memory(tile)
        .memory(x)
        .memory(y)
        .number(m)
        .number(k)
        .number(group)
        .number(1)
        .run();
    for (int r = 0; r < m; ++r) {
      double exact = 0, size = 0;
      for (int i = 0; i < k; ++i) {
        const double p =
            static_cast<int8_t>(tile[r * k + i]) * scales(r * groups + i / group) * x(i);
        exact += p, size += std::fabs(p);
      }
      EXPECT_NEAR(y[r], exact, 1e-5 * size);
    }
    for (int has_zeros : {0, 1}) {
      std::vector<uint8_t> nibbles(m * k / 2 + m * groups * 2 * (1 + has_zeros));
      std::memcpy(nibbles.data(), tile.data(), m * k / 2);
      std::memcpy(nibbles.data() + m * k / 2, scales.data(), m * groups * 2);
      if (has_zeros)
        std::memcpy(nibbles.data() + m * k / 2 + m * groups * 2, zeros.data(), m * groups * 2);
      Runner run = on("gemv_int4");
      run.memory(nibbles).memory(x).memory(y).number(m).number(k).number(group).number(has_zeros);
      run.number(1).run();
      for (int r = 0; r < m; ++r) {
        double exact = 0, size = 0;
        for (int i = 0; i < k; ++i) {
          const uint8_t byte = tile[r * k / 2 + i / 32 * 16 + i % 16];
          const int g = r * groups + i / group, q = i % 32 < 16 ? byte & 15 : byte >> 4;
          const double zero = has_zeros ? zeros(g) : 8;
          exact += (q - zero) * scales(g) * x(i);
          size += (q + std::fabs(zero)) * std::fabs(scales(g) * x(i));
        }
        EXPECT_NEAR(y[r], exact, 1e-5 * size);
      }
    }
  }
}

TEST_P(Kernels, Activations) {
  constexpr int n = 64;
  F32 gate(n), up(n);
  for (int i = 0; i < n; ++i) gate[i] = (i - 32) * 0.25f, up[i] = 1 + i % 3;
  for (int mode : {0, 1, 2}) {
    Bf16 out(n);
    on("silu_mul").memory(gate).memory(up).memory(out).number(n).number(mode).run();
    for (int i = 0; i < n; ++i) {
      const double g = gate[i];
      const double y =
          mode == 0   ? g / (1 + std::exp(-g))
          : mode == 1 ? g * 0.5 * std::erfc(-g * std::sqrt(0.5))
                      : g * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
      // Half a bf16 unit, and the series of erfc: 1.5e-7 |g|.
      EXPECT_NEAR(out(i), y * up[i], std::fabs(y * up[i]) / 250 + 4e-6) << mode << " " << g;
    }
  }
}

// A matrix as 8x8 tiles.
int tiled(int i, int j, int columns) {
  return (i / 8 * (columns / 8) + j / 8) * 64 + i % 8 * 8 + j % 8;
}

TEST_P(Kernels, GemmTileAccumulates) {
  constexpr int m = 16, k = 64, n = 24;
  Bf16 a(m * k, 1), b(k * n, 2);
  F32 c(m * n, 1);
  on("gemm_tile").memory(a).memory(b).memory(c).number(m).number(k).number(n).number(0).run();
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double exact = 1, size = 1;
      for (int t = 0; t < k; ++t) {
        const double p = a(tiled(i, t, k)) * b(tiled(t, j, n));
        exact += p, size += std::fabs(p);
      }
      EXPECT_NEAR(c[tiled(i, j, n)], exact, product_error() * size);
    }
  }
}

TEST_P(Kernels, SoftmaxOfRowsStopsAtTheValidColumns) {
  constexpr int rows = 2, columns = 48, valid = 37;
  Bf16 s(rows * columns, 1, 3), p(rows * columns);
  for (int r = 0; r < rows; ++r)
    for (int j = valid; j < columns; ++j) s[r * columns + j] = 0x7fc0;
  on("softmax_rows").memory(s).memory(p).number(rows).number(columns).number(valid).run();
  for (int r = 0; r < rows; ++r) {
    double total = 0;
    for (int j = 0; j < valid; ++j) total += std::exp2(s(r * columns + j));
    for (int j = 0; j < columns; ++j) {
      const double exact = j < valid ? std::exp2(s(r * columns + j)) / total : 0;
      EXPECT_NEAR(p(r * columns + j), exact, 8e-3 * exact);  // bf16 rounds it twice, the sum once
    }
  }
}

TEST_P(Kernels, MovesAndConversionsAreExact) {
  std::vector<uint8_t> from(37, 9), to(37);
  on("copy").memory(from).memory(to).number(37).run();
  EXPECT_EQ(from, to);
  F32 x(16);
  for (int i = 0; i < 16; ++i) x[i] = 0.1f * static_cast<float>(i);
  Bf16 y(16), z(16);
  on("f32_to_bf16").memory(x).memory(y).number(16).run();
  on("scale_tile").memory(x).memory(z).number(16).number(bits(2)).run();
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(y[i], to_bf16(x[i]));
    EXPECT_EQ(z[i], to_bf16(2 * x[i]));
  }
}

}  // namespace
}  // namespace fasttps::npu
