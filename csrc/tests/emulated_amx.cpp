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

}  // namespace

#include "cpu/kernels/all.h"
#include "cpu/kernels/tiled_linear.h"

namespace fasttps::cpu {

const KernelTable kEmulatedAmxKernels =
    with_tiles<Vec, EmulatedTiles>(kernel_table_for<Vec>("emulated_amx", 0));

bool emulated_tiles_are_configured() { return EmulatedTiles::configured(); }

int64_t emulated_tile_products() { return EmulatedTiles::products(); }

}  // namespace fasttps::cpu
