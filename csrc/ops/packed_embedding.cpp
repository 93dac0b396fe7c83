#include "packed_embedding.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "check.h"

namespace fasttps {
namespace {

constexpr const char* kOp = "packed_embedding";

at::Tensor packed_embedding_meta(const at::Tensor& ids, const at::Tensor& packed, int64_t format,
                                 int64_t rows, int64_t cols, at::ScalarType dtype,
                                 int64_t group_size) {
  check_packed_embedding({ids, packed, format, rows, cols, dtype, group_size});
  return empty_packed_embedding(ids, cols, dtype);
}

}  // namespace

void check_packed_embedding(const PackedEmbeddingArgs& args) {
  check_dtype(kOp, "ids", args.ids, {at::kLong, at::kInt});
  const PackedFormat format = check_format(kOp, "format", args.format);
  TORCH_CHECK_VALUE(args.rows >= 1 && args.rows <= int64_t{1} << 40, kOp,
                    ": rows must be 1 to 2^40, got ", args.rows);
  TORCH_CHECK_VALUE(args.cols >= 1 && args.cols <= (int64_t{1} << 40) / args.rows, kOp,
                    ": cols must be at least 1, and rows * cols at most 2^40, got ", args.cols);
  check_packed(kOp, "packed", args.packed, format, packed_panels(args.rows), args.cols,
               args.group_size);
  TORCH_CHECK_TYPE(
      args.dtype == at::kFloat || args.dtype == at::kBFloat16 || args.dtype == at::kHalf, kOp,
      ": dtype must be float32 or bfloat16 or float16, got ", dtype_name(args.dtype));
  check_same_device(kOp, "packed", args.packed, "ids", args.ids);
}

at::Tensor empty_packed_embedding(const at::Tensor& ids, int64_t cols, at::ScalarType dtype) {
  c10::SymDimVector sizes(ids.sym_sizes().begin(), ids.sym_sizes().end());
  sizes.push_back(cols);
  return at::empty_symint(sizes, ids.options().dtype(dtype));
}

TORCH_LIBRARY_IMPL(fasttps, Meta, m) { m.impl("packed_embedding", packed_embedding_meta); }

}  // namespace fasttps
