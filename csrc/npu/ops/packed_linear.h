#pragma once
#include "gate_up_silu_mlp.h"

namespace fasttps::npu {

// y = W x for one token. Arguments: x [cols] (in, of MatvecTiling::vector_bytes), weight (in;
// pack_matvec), y [rows] (out); vectors bf16.
struct PackedLinearSizes {
  int64_t rows;
  int64_t cols;
  TileFormat format = TileFormat::kBf16;
  int64_t group_size = 0;
};

LoweredMatvec lower_packed_linear(const PackedLinearSizes& sizes, const Machine& machine);

}  // namespace fasttps::npu
