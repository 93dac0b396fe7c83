#pragma once
#include <ATen/core/Tensor.h>

#include "pack_weight.h"

namespace fasttps {

// The quantised blocks of a GGUF tensor in the packed layout; no quant and no scale changes.
//   blocks  uint8 [rows, bytes of a row], contiguous: Q4_0 for format 4 (int4 in groups of 32),
//   Q4_1
//           for 5, Q8_0 for 6, Q4_K for 7, Q6_K for 8
//   cols    weights of a row: a multiple of 32, of 256 for Q4_K and Q6_K
// Out: as pack_weight.
PackedShape check_pack_gguf(const at::Tensor& blocks, int64_t format, int64_t rows, int64_t cols);

// The overload that writes its panels: out is uint8 [panels, bytes of a panel], dense in a panel.
PackedShape check_pack_gguf_out(const at::Tensor& blocks, int64_t format, int64_t rows,
                                int64_t cols, const at::Tensor& out);

}  // namespace fasttps
