#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "pack_weight.h"

namespace fasttps {

// Quants and scales of another program in the packed layout, none of them changed: a weight
// d (q - z), with z the format's own but for kInt4Zero.
//   quants  uint8 [rows, cols], any strides; below 16 for kInt4 and kInt4Zero
//   scales  d of every row and group of columns: f16 [rows, groups]; f32 [rows, 1] for kInt8
//   zeros   uint8 [rows, groups], below 128, for kInt4Zero; else none
//   format  kInt8, kInt4, kInt8Group or kInt4Zero
// groups = ceil(cols / group_size). Out: as pack_weight.
PackedShape check_pack_quants(const at::Tensor& quants, const at::Tensor& scales,
                              const std::optional<at::Tensor>& zeros, int64_t format,
                              int64_t group_size);

}  // namespace fasttps
