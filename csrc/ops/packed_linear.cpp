#include "packed_linear.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "check.h"

namespace fasttps {
namespace {

constexpr const char* kOp = "packed_linear";

at::Tensor packed_linear_meta(const at::Tensor& x, const at::Tensor& packed, int64_t format,
                              int64_t rows, int64_t group_size, bool int8_activation,
                              const std::optional<at::Tensor>& bias) {
  if (!has_symbolic_sizes(x)) {
    check_packed_linear({x, packed, format, rows, group_size, int8_activation, bias});
  }
  return empty_packed_linear(x, rows);
}

}  // namespace

PackedLinearShape check_packed_linear(const PackedLinearArgs& args) {
  const at::Tensor& x = args.x;
  const PackedFormat format = check_format(kOp, "format", args.format);
  check_given(kOp, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, kOp, ": x must be [..., cols], got shape ", x.sizes());
  check_float_dtype(kOp, "x", x);
  check_dense_last_dim(kOp, "x", x);
  const int64_t cols = x.size(-1);
  TORCH_CHECK_VALUE(cols >= 1, kOp, ": x must have at least 1 column, got ", x.sizes());
  TORCH_CHECK_VALUE(args.rows >= 1 && args.rows <= (int64_t{1} << 40) / cols, kOp,
                    ": rows must be at least 1, and rows * cols at most 2^40, got ", args.rows);
  check_packed(kOp, "packed", args.packed, format, packed_panels(args.rows), cols, args.group_size);
  check_dtype_of_x(kOp, x, "packed", format);
  TORCH_CHECK_VALUE(!args.int8_activation || is_quantized(format), kOp,
                    ": int8_activation must be False for a format that is not quantised, got True");
  check_same_device(kOp, "packed", args.packed, "x", x);
  check_bias(kOp, "bias", args.bias, "[rows]", args.rows, x);
  return {format, element_count(x) / cols, cols};
}

at::Tensor empty_packed_linear(const at::Tensor& x, int64_t rows) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = rows;
  return at::empty_symint(sizes, x.options().requires_grad(false));
}

TORCH_LIBRARY_IMPL(fasttps, Meta, m) { m.impl("packed_linear", packed_linear_meta); }

}  // namespace fasttps
