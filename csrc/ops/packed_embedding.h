#pragma once
#include <ATen/core/Tensor.h>

#include "packed_format.h"

namespace fasttps {

// Rows of a packed weight, dequantised: the embedding that shares its weight with a packed linear.
//   ids     [...] int64 or int32, 0 <= id < rows
//   packed  [rows, cols] (pack_weight)
//   dtype   float32, bfloat16 or float16
// Out: [..., cols] of dtype, contiguous.
struct PackedEmbeddingArgs {
  const at::Tensor& ids;
  const at::Tensor& packed;
  int64_t format;
  int64_t rows;
  int64_t cols;
  at::ScalarType dtype;
  int64_t group_size;
};

// The values of ids are left to the device that holds them.
void check_packed_embedding(const PackedEmbeddingArgs& args);

at::Tensor empty_packed_embedding(const at::Tensor& ids, int64_t cols, at::ScalarType dtype);

}  // namespace fasttps
