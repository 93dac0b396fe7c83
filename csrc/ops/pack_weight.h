#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

#include "packed_format.h"

namespace fasttps {

// Packing and its inverse; layout: packed_format.h. For formats of a dtype all four are pure moves;
// the others round, and unpack what the kernels multiply with, in float32.
//   pack_weight(weight [rows, cols]) -> packed
//   unpack_weight(packed, rows, cols) -> weight
//   pack_gate_up(gate, up [rows, cols]) -> packed
//   unpack_gate_up(packed, rows, cols) -> gate, up
// Weights have the format's dtype, or any float dtype where it is quantised, and a dense last
// dimension; packed is uint8, 64-byte aligned.
struct PackedShape {
  PackedFormat format;
  int64_t rows, cols, group_size;
  int64_t panels;  // both halves of a gate_up
};

PackedShape check_pack_weight(const at::Tensor& weight, int64_t format, int64_t group_size);
PackedShape check_unpack_weight(const at::Tensor& packed, int64_t format, int64_t rows,
                                int64_t cols, int64_t group_size);
PackedShape check_pack_gate_up(const at::Tensor& gate, const at::Tensor& up, int64_t format,
                               int64_t group_size);
PackedShape check_unpack_gate_up(const at::Tensor& packed, int64_t format, int64_t rows,
                                 int64_t cols, int64_t group_size);

at::Tensor empty_packed(const at::Tensor& like, const PackedShape& shape);
at::Tensor empty_unpacked(const at::Tensor& like, const PackedShape& shape);

}  // namespace fasttps
