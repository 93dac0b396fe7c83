#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "packed_format.h"

namespace fasttps {

// x W^T + b over a packed weight.
//   x       [..., cols] of the format's dtype, any float dtype if quantised; dense last dimension
//   packed  [rows, cols] (pack_weight)
//   bias    [rows], float32 or x's dtype
// int8_activation: x is rounded to int8 by 32 columns; quantised formats only.
// Out: [..., rows] of x's dtype, contiguous. Sums in f32.
struct PackedLinearArgs {
  const at::Tensor& x;
  const at::Tensor& packed;
  int64_t format;
  int64_t rows;
  int64_t group_size;
  bool int8_activation;
  const std::optional<at::Tensor>& bias;
};

struct PackedLinearShape {
  PackedFormat format;
  int64_t tokens, cols;
};

PackedLinearShape check_packed_linear(const PackedLinearArgs& args);

at::Tensor empty_packed_linear(const at::Tensor& x, int64_t rows);

}  // namespace fasttps
