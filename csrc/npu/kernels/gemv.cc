#include "kernel.h"

// y [m] += W x, in f32; first: y starts at 0. Groups have 32 values or a multiple of it.

// w: [m, k] bf16. k a multiple of 32.
TILE_KERNEL void gemv(const bfloat16* w, const bfloat16* x, float* y, int32_t m, int32_t k,
                      int32_t first) {
  for (int32_t r = 0; r < m; ++r, w += k) {
    auto sum = aie::zeros<accfloat, 32>();
    for (int32_t i = 0; i < k; i += 32)
      sum = aie::mac(sum, aie::load_v<32>(w + i), aie::load_v<32>(x + i));
    y[r] = (first ? 0 : y[r]) + aie::reduce_add(sum.to_vector<float>());
  }
}

// tile: [m, k] int8, then scales [m, k / group] bf16.
TILE_KERNEL void gemv_int8(const int8_t* tile, const bfloat16* x, float* y, int32_t m, int32_t k,
                           int32_t group, int32_t first) {
  const auto* scales = reinterpret_cast<const bfloat16*>(tile + m * k);
  for (int32_t r = 0; r < m; ++r, tile += k) {
    auto sum = aie::zeros<accfloat, 32>();
    for (int32_t g = 0; g < k; g += group) {
      auto part = aie::zeros<accfloat, 32>();
      for (int32_t i = g; i < g + group; i += 32)
        part = aie::mac(part, aie::to_float<bfloat16>(aie::load_v<32>(tile + i).unpack()),
                        aie::load_v<32>(x + i));
      const auto scale = aie::broadcast<float, 32>(float(*scales++));
      sum = aie::mac(sum, part.to_vector<float>(), scale);
    }
    y[r] = (first ? 0 : y[r]) + aie::reduce_add(sum.to_vector<float>());
  }
}

// tile: [m, k / 32, 16] bytes, the low half of byte i value i of its 32 and the high half value
// i + 16; then scales [m, k / group] bf16; where zero_points, then as many of them in bf16, else
// they are 8. W = scale * (value - zero).
TILE_KERNEL void gemv_int4(const uint8_t* tile, const bfloat16* x, float* y, int32_t m, int32_t k,
                           int32_t group, int32_t zero_points, int32_t first) {
  const auto* scales = reinterpret_cast<const bfloat16*>(tile + m * k / 2);
  const bfloat16* zeros = scales + m * (k / group);
  for (int32_t r = 0; r < m; ++r, tile += k / 2) {
    auto sum = aie::zeros<accfloat, 32>();
    for (int32_t g = 0; g < k; g += group) {
      auto part = aie::zeros<accfloat, 32>();
      const auto zero = aie::broadcast<bfloat16, 32>(zero_points ? float(*zeros++) : 0.0f);
      for (int32_t i = g; i < g + group; i += 32) {
        const auto bytes = aie::load_v<16>(tile + i / 2);
        auto values = aie::concat(aie::bit_and(15, bytes), aie::downshift(bytes, 4)).unpack();
        if (!zero_points) values = aie::sub(values, aie::broadcast<int16, 32>(8));
        const auto xs = aie::load_v<32>(x + i);
        part = aie::mac(part, aie::to_float<bfloat16>(values), xs);
        if (zero_points) part = aie::msc(part, zero, xs);
      }
      const auto scale = aie::broadcast<float, 32>(float(*scales++));
      sum = aie::mac(sum, part.to_vector<float>(), scale);
    }
    y[r] = (first ? 0 : y[r]) + aie::reduce_add(sum.to_vector<float>());
  }
}
