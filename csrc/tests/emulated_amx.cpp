#include "emulated_amx.h"

#include "cpu/isa/scalar_vec.h"
#include "emulated_tiles.h"

namespace {

// vdpbf16ps for one row.
inline Vec dot_bf16_pairs(Vec acc, OneQuad weights, OneQuad activations) {
  for (const int shift : {16, 0}) {
    const float x = bf16_to_f32(static_cast<uint16_t>(activations.v >> shift));
    acc = fmadd(Vec{x}, Vec{bf16_to_f32(static_cast<uint16_t>(weights.v >> shift))}, acc);
  }
  return acc;
}
inline Vec dot_pairs(Vec acc, OneQuad a, OneQuad b) { return dot_bf16_pairs(acc, a, b); }

struct Pair {
  uint32_t v;
  void store(uint32_t* p) const { *p = v; }
};
inline Pair bf16_pairs(Vec first, Vec second) {
  return {static_cast<uint32_t>(f32_to_bf16(second.v)) << 16 | f32_to_bf16(first.v)};
}
inline Pair exact_bf16_pairs(Vec first, Vec second) { return bf16_pairs(first, second); }

}  // namespace

#include "cpu/kernels/all.h"
#include "cpu/kernels/tiled_linear.h"
#include "cpu/kernels/tiled_prefill.h"

namespace fasttps::cpu {

const KernelTable kEmulatedAmxKernels = with_tiled_prefill<Vec, EmulatedTiles>(
    with_tiles<Vec, EmulatedTiles>(kernel_table_for<Vec>("emulated_amx", 0)));

bool emulated_tiles_are_configured() { return EmulatedTiles::configured(); }

int64_t emulated_tile_products() { return EmulatedTiles::products(); }

}  // namespace fasttps::cpu
