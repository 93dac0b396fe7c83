#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "cpu/kernels/tiles.h"

// The instructions of AMX after the pseudo-code of Intel's Software Developer's Manual, volume 2.
// Where the CPU would raise #UD or #GP, std::logic_error is thrown. The state is that of a thread.
namespace {

class EmulatedTiles {
 public:
  static bool configured() { return state().config.palette != 0; }
  static int64_t& products() {  // that this thread has computed
    static thread_local int64_t count = 0;
    return count;
  }

  static void configure(const fasttps::cpu::TileConfig& config) {
    check(config.palette == 1, "ldtilecfg: palette");
    check(config.start_row == 0, "ldtilecfg: start row");
    for (const uint8_t byte : config.reserved) check(byte == 0, "ldtilecfg: reserved bytes");
    for (int i = 0; i < 16; ++i) {
      check(config.rows[i] <= 16 && config.row_bytes[i] <= 64, "ldtilecfg: too large a tile");
      check((config.rows[i] == 0) == (config.row_bytes[i] == 0), "ldtilecfg: half a tile");
      check(i < 8 || config.rows[i] == 0, "ldtilecfg: tile beyond the eighth");
    }
    state() = {};
    state().config = config;
  }
  static void release() {
    state() = {};
    state().config.palette = 0;
  }

  template <int t>
  static void zero() {
    used<t>();
    std::memset(state().data[t], 0, sizeof state().data[t]);
  }
  template <int t>
  static void load(const void* rows, int64_t stride_bytes) {
    const auto [count, bytes] = used<t>();
    std::memset(state().data[t], 0, sizeof state().data[t]);
    for (int row = 0; row < count; ++row) {
      std::memcpy(state().data[t][row], static_cast<const char*>(rows) + row * stride_bytes, bytes);
    }
  }
  template <int t>
  static void store(void* rows, int64_t stride_bytes) {
    const auto [count, bytes] = used<t>();
    for (int row = 0; row < count; ++row) {
      std::memcpy(static_cast<char*>(rows) + row * stride_bytes, state().data[t][row], bytes);
    }
  }

  // The even and the odd products of a row have a sum each, by fma; the two are added, then that is
  // added to c. Subnormals that go in or come out are zero; halves are rounded to even.
  template <int c, int a, int b>
  static void dot_bf16() {
    const auto [rows, pairs, columns] = product_shape<c, a, b>();
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n) {
        float sums[2] = {0.0f, 0.0f};
        for (int k = 0; k < pairs; ++k) {
          for (int i = 0; i < 2; ++i) {
            const float x = bf16_at(a, m, 2 * k + i), w = bf16_at(b, k, 2 * n + i);
            sums[i] = flushed(std::fma(x, w, sums[i]));
          }
        }
        float sum;
        std::memcpy(&sum, state().data[c][m] + 4 * n, 4);
        sum = flushed(flushed(sum) + flushed(sums[0] + sums[1]));
        std::memcpy(state().data[c][m] + 4 * n, &sum, 4);
      }
    }
    clear_rest<c>();
  }

  template <int c, int a, int b>
  static void dot_s8u8() {
    dot_bytes<c, a, b, int8_t, uint8_t>();
  }
  template <int c, int a, int b>
  static void dot_s8s8() {
    dot_bytes<c, a, b, int8_t, int8_t>();
  }
  template <int c, int a, int b>
  static void dot_u8s8() {
    dot_bytes<c, a, b, uint8_t, int8_t>();
  }

 private:
  struct State {
    fasttps::cpu::TileConfig config;
    uint8_t data[8][16][64];
  };
  struct Shape {
    int rows, row_bytes;
  };
  struct ProductShape {
    int rows, quads, columns;
  };

  static State& state() {
    static thread_local State state = [] {
      State s{};
      s.config.palette = 0;
      return s;
    }();
    return state;
  }
  static void check(bool good, const char* what) {
    if (!good) throw std::logic_error(what);
  }
  template <int t>
  static Shape used() {
    static_assert(t >= 0 && t < 8);
    check(configured(), "a tile is used while none is configured");
    const fasttps::cpu::TileConfig& config = state().config;
    check(config.rows[t] != 0, "a tile is used that is not configured");
    return {config.rows[t], config.row_bytes[t]};
  }
  template <int c, int a, int b>
  static ProductShape product_shape() {
    static_assert(c != a && a != b && c != b);
    const Shape of_c = used<c>(), of_a = used<a>(), of_b = used<b>();
    check(of_c.row_bytes % 4 == 0 && of_a.row_bytes % 4 == 0 && of_b.row_bytes % 4 == 0,
          "product: a row that is not whole in 4 bytes");
    check(of_c.rows == of_a.rows, "product: rows of c and a differ");
    check(of_a.row_bytes / 4 == of_b.rows, "product: columns of a and rows of b differ");
    check(of_c.row_bytes == of_b.row_bytes, "product: columns of c and b differ");
    ++products();
    return {of_c.rows, of_b.rows, of_c.row_bytes / 4};
  }
  template <int t>
  static void clear_rest() {
    const auto [count, bytes] = used<t>();
    for (int row = 0; row < 16; ++row) {
      const int from = row < count ? bytes : 0;
      std::memset(state().data[t][row] + from, 0, static_cast<size_t>(64 - from));
    }
  }

  static float flushed(float x) {
    return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
  }
  static float bf16_at(int tile, int row, int element) {
    uint16_t half;
    std::memcpy(&half, state().data[tile][row] + 2 * element, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return flushed(x);
  }
  template <int c, int a, int b, class OfA, class OfB>
  static void dot_bytes() {
    const auto [rows, quads, columns] = product_shape<c, a, b>();
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n) {
        uint32_t sum;
        std::memcpy(&sum, state().data[c][m] + 4 * n, 4);
        for (int k = 0; k < quads; ++k) {
          for (int i = 0; i < 4; ++i) {
            const int32_t x = static_cast<OfA>(state().data[a][m][4 * k + i]);
            const int32_t w = static_cast<OfB>(state().data[b][k][4 * n + i]);
            sum += static_cast<uint32_t>(x * w);  // wraps, as the instruction does
          }
        }
        std::memcpy(state().data[c][m] + 4 * n, &sum, 4);
      }
    }
    clear_rest<c>();
  }
};

}  // namespace
