#pragma once
#include <cstdint>
#include <random>
#include <vector>

#include "aie_api/bfloat16.hpp"
#include "npu/device.h"

namespace fasttps::npu {

// Numbers of a normal distribution, seeded, as bfloat16.
inline std::vector<bfloat16> random_bf16(size_t count, unsigned seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<bfloat16> out(count);
  for (bfloat16& x : out) x = bfloat16(normal(generator));
  return out;
}

inline bfloat16* bf16_of(Buffer& buffer) { return reinterpret_cast<bfloat16*>(buffer.host()); }

}  // namespace fasttps::npu
