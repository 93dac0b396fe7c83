#include "../../ops/gate_up_silu_mlp.h"

#include <ATen/ops/reshape.h>
#include <torch/library.h>

#include <algorithm>

#include "../element_type.h"
#include "packed_matmul.h"

namespace fasttps::cpu {
namespace {

at::Tensor gate_up_silu_mlp(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                            int64_t gate_up_format, int64_t down_format, int64_t intermediate_size,
                            int64_t gate_up_group_size, int64_t down_group_size,
                            std::string_view activation, const std::optional<at::Tensor>& gate_bias,
                            const std::optional<at::Tensor>& up_bias,
                            const std::optional<at::Tensor>& down_bias, bool int8_activation) {
  const GateUpSiluMlpShape shape = check_gate_up_silu_mlp(
      {x, gate_up, down, gate_up_format, down_format, intermediate_size, gate_up_group_size,
       down_group_size, activation, gate_bias, up_bias, down_bias, int8_activation});
  at::Tensor out = empty_like_contiguous(x);
  if (shape.tokens == 0) return out;
  const at::Tensor rows = at::reshape(x, {shape.tokens, shape.hidden_size});

  const int int8 = int8_activation ? 1 : 0;
  const PackedLinearKernels& gate_up_table = linear_kernels(gate_up_format)[int8];
  const PackedLinearKernels& down_table = linear_kernels(down_format)[int8];
  const int64_t hidden_cols =
      packed_cols(shape.gate_up_format, shape.hidden_size, gate_up_group_size);
  const int64_t intermediate_cols =
      packed_cols(shape.down_format, intermediate_size, down_group_size);
  const int64_t gate_panels = packed_panels(intermediate_size);
  const int64_t block = tokens_at_once(shape.tokens);
  Activations x_rows(gate_up_table.kind, block, shape.hidden_size, hidden_cols);
  // The gate_up kernel writes whole panels, zeros past the last row. If that is already how the
  // down kernel reads, it reads there.
  const ElementType h_type = down_table.kind == kActBf16 ? kBf16 : kF32;
  const int64_t h_cols = gate_panels * kPanelRows, h_element_bytes = h_type == kBf16 ? 2 : 4;
  const int64_t h_bytes = spread_row_bytes(h_cols * h_element_bytes);
  const int64_t h_stride = h_bytes / h_element_bytes;
  const CacheLines h(block * h_bytes);
  const bool h_is_ready = down_table.kind != kActInt8 && intermediate_cols <= h_cols;
  std::optional<Activations> h_rows;
  if (!h_is_ready) h_rows.emplace(down_table.kind, block, intermediate_size, intermediate_cols);
  const std::vector<float> gate_bias_f32 = padded_bias(gate_bias, intermediate_size);
  const std::vector<float> up_bias_f32 = padded_bias(up_bias, intermediate_size);
  const std::vector<float> down_bias_f32 = padded_bias(down_bias, shape.hidden_size);
  const int64_t gate_panel_bytes =
      packed_panel_bytes(shape.gate_up_format, shape.hidden_size, gate_up_group_size);
  const int64_t down_panel_bytes =
      packed_panel_bytes(shape.down_format, intermediate_size, down_group_size);

  for (int64_t token = 0; token < shape.tokens; token += block) {
    const int64_t tokens = std::min(block, shape.tokens - token);
    x_rows.prepare(element(rows, token * rows.stride(0)), element_type(x), rows.stride(0), tokens);
    for_panel_pieces(gate_panels, 2 * gate_panel_bytes, tokens, [&](int64_t begin, int64_t end) {
      gate_up_table.gate_up({x_rows.data(), x_rows.row_bytes(), tokens, hidden_cols,
                             gate_up_group_size, gate_up.const_data_ptr(), begin, end,
                             data_or_null(gate_bias_f32), data_or_null(up_bias_f32),
                             static_cast<Activation>(shape.activation), h.data(), h_type, h_stride,
                             h_cols});
    });
    if (h_rows) h_rows->prepare(h.data(), h_type, h_stride, tokens);
    void* out_rows = mutable_element(out, token * shape.hidden_size);
    for_panel_pieces(packed_panels(shape.hidden_size), down_panel_bytes, tokens,
                     [&](int64_t begin, int64_t end) {
                       down_table.linear({h_rows ? h_rows->data() : h.data(),
                                          h_rows ? h_rows->row_bytes() : h_bytes, tokens,
                                          intermediate_cols, down_group_size, down.const_data_ptr(),
                                          begin, end, data_or_null(down_bias_f32), false, out_rows,
                                          element_type(out), shape.hidden_size, shape.hidden_size});
                     });
  }
  return out;
}

TORCH_LIBRARY_IMPL(fasttps, CPU, m) { m.impl("gate_up_silu_mlp", gate_up_silu_mlp); }

}  // namespace
}  // namespace fasttps::cpu
