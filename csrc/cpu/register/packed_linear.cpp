#include "../../ops/packed_linear.h"

#include <ATen/ops/reshape.h>
#include <torch/library.h>

#include <algorithm>

#include "../element_type.h"
#include "packed_matmul.h"

namespace fasttps::cpu {
namespace {

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, int64_t format,
                         int64_t rows, int64_t group_size, bool int8_activation,
                         const std::optional<at::Tensor>& bias) {
  const PackedLinearShape shape =
      check_packed_linear({x, packed, format, rows, group_size, int8_activation, bias});
  at::Tensor out = empty_packed_linear(x, rows);
  if (shape.tokens == 0) return out;
  const at::Tensor tokens_of_x = at::reshape(x, {shape.tokens, shape.cols});
  const PackedLinearKernels& table = linear_kernels(format)[int8_activation ? 1 : 0];
  const int64_t cols = packed_cols(shape.format, shape.cols, group_size);
  const int64_t block = tokens_at_once(shape.tokens);
  Activations activations(table.kind, block, shape.cols, cols);
  const std::vector<float> bias_f32 = padded_bias(bias, rows);
  for (int64_t token = 0; token < shape.tokens; token += block) {
    const int64_t tokens = std::min(block, shape.tokens - token);
    const int64_t stride = tokens_of_x.stride(0);
    activations.prepare(element(tokens_of_x, token * stride), element_type(x), stride, tokens);
    void* out_rows = mutable_element(out, token * rows);
    for_panel_pieces(
        packed_panels(rows), packed_panel_bytes(shape.format, shape.cols, group_size), tokens,
        [&](int64_t begin, int64_t end) {
          table.linear({activations.data(), activations.row_bytes(), tokens, cols, group_size,
                        packed.const_data_ptr(), begin, end, data_or_null(bias_f32), false,
                        out_rows, element_type(out), rows, rows});
        });
  }
  return out;
}

TORCH_LIBRARY_IMPL(fasttps, CPU, m) { m.impl("packed_linear", packed_linear); }

}  // namespace
}  // namespace fasttps::cpu
