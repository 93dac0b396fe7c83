// Kernels of products of a matrix with one vector, a tile of the matrix at a time.
#include "exp2.h"
#include "kernel.h"

// to = from, `bytes` of them, in a multiple of 4.
FASTTPS_KERNEL void copy(const void* from, void* to, int64_t bytes) {
  const auto* source = static_cast<const uint8_t*>(from);
  auto* target = static_cast<uint8_t*>(to);
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) aie::store_v(target + i, aie::load_v<64>(source + i));
  for (; i < bytes; i += 4) aie::store_v(target + i, aie::load_v<4>(source + i));
}

// y[r] (+)= sum_c w[r, c] x[c], in float32.
//   w [rows, cols] bf16, x [cols] bf16, y [rows] f32; cols in a multiple of 32
//   accumulate: 0 begins y, else it is added to
FASTTPS_KERNEL void gemv(const void* w, const void* x, void* y, int64_t rows, int64_t cols,
                         int64_t accumulate) {
  const auto* matrix = static_cast<const bfloat16*>(w);
  const auto* vector = static_cast<const bfloat16*>(x);
  auto* sums = static_cast<float*>(y);
  for (int64_t r = 0; r < rows; ++r) {
    auto sum = aie::zeros<accfloat, 32>();
    for (int64_t c = 0; c < cols; c += 32) {
      sum = aie::mac(sum, aie::load_v<32>(matrix + r * cols + c), aie::load_v<32>(vector + c));
    }
    const float found = aie::reduce_add(sum.to_vector<float>());
    sums[r] = accumulate ? sums[r] + found : found;
  }
}

// The same of a matrix in unsigned 4 bits about 8, each group of a row times its scale.
//   w  quants [rows, cols / 2], columns 2i in the low halves, then scales [rows, cols / group] bf16
//   group_size in a multiple of 32
FASTTPS_KERNEL void gemv_int4(const void* w, const void* x, void* y, int64_t rows, int64_t cols,
                              int64_t group_size, int64_t accumulate) {
  const auto* quants = static_cast<const uint8_t*>(w);
  const auto* scales = reinterpret_cast<const bfloat16*>(quants + rows * cols / 2);
  const auto* vector = static_cast<const bfloat16*>(x);
  auto* sums = static_cast<float*>(y);
  const auto eight = aie::broadcast<int8_t, 32>(8);
  for (int64_t r = 0; r < rows; ++r) {
    auto sum = aie::zeros<accfloat, 32>();
    for (int64_t group = 0; group < cols; group += group_size) {
      auto of_group = aie::zeros<accfloat, 32>();
      for (int64_t c = group; c < group + group_size; c += 32) {
        const auto pairs =
            aie::load_v<32>(reinterpret_cast<const uint4*>(quants + (r * cols + c) / 2));
        const auto quant = aie::sub(aie::unpack(pairs).template cast_to<int8_t>(), eight);
        of_group = aie::mac(of_group, aie::to_float<bfloat16>(quant), aie::load_v<32>(vector + c));
      }
      const float scale = scales[(r * cols + group) / group_size];
      sum = aie::mac(sum, of_group.template to_vector<float>(), aie::broadcast<float, 32>(scale));
    }
    const float found = aie::reduce_add(sum.to_vector<float>());
    sums[r] = accumulate ? sums[r] + found : found;
  }
}

// f32 [n] to bf16, to nearest even.
FASTTPS_KERNEL void f32_to_bf16(const void* from, void* to, int64_t n) {
  const auto mode = aie::swap_rounding(aie::rounding_mode::conv_even);
  const auto* source = static_cast<const float*>(from);
  auto* target = static_cast<bfloat16*>(to);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const aie::accum<accfloat, 16> x(aie::load_v<16>(source + i));
    aie::store_v(target + i, x.to_vector<bfloat16>());
  }
  for (; i < n; ++i) {
    const aie::accum<accfloat, 1> x(aie::load_v<1>(source + i));
    aie::store_v(target + i, x.to_vector<bfloat16>());
  }
  aie::set_rounding(mode);
}

// out = gate / (1 + e^-gate) * up in float32, then to bf16, to nearest even.
//   gate, up [n] f32, out [n] bf16
FASTTPS_KERNEL void silu_mul(const void* gate, const void* up, void* out, int64_t n) {
  const auto mode = aie::swap_rounding(aie::rounding_mode::conv_even);
  const auto minus_log2_e = aie::broadcast<float, 16>(-1.44269504f);
  const auto one = aie::broadcast<float, 16>(1.0f);
  const auto* gates = static_cast<const float*>(gate);
  const auto* ups = static_cast<const float*>(up);
  auto* target = static_cast<bfloat16*>(out);
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t count = n - i < 16 ? n - i : 16;
    // The last lanes may not be there: they are read and written one by one.
    aie::vector<float, 16> g, u;
    for (int64_t k = 0; k < count; ++k) {
      g.set(gates[i + k], static_cast<unsigned>(k));
      u.set(ups[i + k], static_cast<unsigned>(k));
    }
    const auto power = exp2_polynomial(aie::mul(g, minus_log2_e).to_vector<float>());
    const auto sigmoid = aie::inv(aie::add(one, power));
    const auto silu = aie::mul(g, sigmoid).to_vector<float>();
    const auto result = aie::mul(silu, u).to_vector<bfloat16>();
    for (int64_t k = 0; k < count; ++k) target[i + k] = result.get(static_cast<unsigned>(k));
  }
  aie::set_rounding(mode);
}
