#pragma once
#include <cstdint>
#include <random>
#include <vector>

#include "aie_api/types.hpp"
#include "npu/device.h"

namespace fasttps::npu {

// To the nearest, halves to even: a host's thread begins with a core's mode, floor.
inline bfloat16 nearest_bf16(double x) {
  const aie::rounding_mode mode = aie::swap_rounding(aie::rounding_mode::conv_even);
  const bfloat16 out(static_cast<float>(x));
  aie::set_rounding(mode);
  return out;
}

// Numbers of a normal distribution, seeded, as bfloat16.
inline std::vector<bfloat16> random_bf16(size_t count, unsigned seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<bfloat16> out(count);
  for (bfloat16& x : out) x = nearest_bf16(normal(generator));
  return out;
}

inline bfloat16* bf16_of(Buffer& buffer) { return reinterpret_cast<bfloat16*>(buffer.host()); }

}  // namespace fasttps::npu
