#include "kernel.h"

using Multiplier = aie::mmul<8, 8, 8, bfloat16>;

// c [m, n] f32 += a [m, k] b [k, n], all in tiles of 8 x 8 as in prefill.cc; first: c starts at 0.
// Multiples of 8.
TILE_KERNEL void gemm_tile(const bfloat16* a, const bfloat16* b, float* c, int32_t m, int32_t k,
                           int32_t n, int32_t first) {
  const RoundToEven even;
  for (int32_t i = 0; i < m / 8; ++i) {
    for (int32_t j = 0; j < n / 8; ++j) {
      float* to = c + (i * (n / 8) + j) * 64;
      Multiplier sum(first ? aie::zeros<float, 64>() : aie::load_v<64>(to));
      for (int32_t t = 0; t < k / 8; ++t)
        sum.mac(aie::load_v<64>(a + (i * (k / 8) + t) * 64),
                aie::load_v<64>(b + (t * (n / 8) + j) * 64));
      aie::store_v(to, sum.to_vector<float>());
    }
  }
}
