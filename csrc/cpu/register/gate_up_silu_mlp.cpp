#include "../../ops/gate_up_silu_mlp.h"

#include <ATen/Parallel.h>
#include <ATen/ops/reshape.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "../dispatch.h"
#include "../element_type.h"

namespace fasttps::cpu {
namespace {

// Tokens whose intermediate is held at once.
constexpr int64_t kTokenBlock = 256;

// A bias in f32, zero up to whole panels; empty if there is none.
std::vector<float> padded_bias(const std::optional<at::Tensor>& bias, int64_t size) {
  if (!bias) return {};
  std::vector<float> out(static_cast<size_t>(packed_panels(size) * kPanelRows), 0.0f);
  const at::Tensor dense = bias->contiguous();
  kernels().load_row[element_type(dense)](dense.const_data_ptr(), out.data(), size);
  return out;
}

const float* data_or_null(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

// Panels in contiguous ranges, one stream of weights a thread.
template <class Run>
void for_panel_ranges(int64_t panels, int64_t panel_bytes, const Run& run) {
  at::parallel_for(0, panels, 1 + 32768 / panel_bytes, run);
}

at::Tensor gate_up_silu_mlp(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                            int64_t gate_up_format, int64_t down_format, int64_t intermediate_size,
                            int64_t gate_up_group_size, int64_t down_group_size,
                            std::string_view activation, const std::optional<at::Tensor>& gate_bias,
                            const std::optional<at::Tensor>& up_bias,
                            const std::optional<at::Tensor>& down_bias) {
  const GateUpSiluMlpShape shape = check_gate_up_silu_mlp(
      {x, gate_up, down, gate_up_format, down_format, intermediate_size, gate_up_group_size,
       down_group_size, activation, gate_bias, up_bias, down_bias});
  at::Tensor out = empty_like_contiguous(x);
  if (shape.tokens == 0) return out;
  const at::Tensor rows = at::reshape(x, {shape.tokens, shape.hidden_size});

  const PackedLinearKernels& table = kernels().gate_up_silu_mlp[static_cast<int>(element_type(x))];
  const int64_t hidden_cols = packed_cols(shape.format, shape.hidden_size);
  const int64_t intermediate_cols = packed_cols(shape.format, intermediate_size);
  const int64_t gate_panels = packed_panels(intermediate_size);
  const int64_t h_stride = gate_panels * kPanelRows;
  const int64_t block = std::min(kTokenBlock, shape.tokens);
  const auto bytes = [&](int64_t count) {
    return std::make_unique_for_overwrite<char[]>(
        static_cast<size_t>(block * count * table.activation_bytes));
  };
  const auto x_rows = bytes(hidden_cols);
  const auto h_rows = bytes(h_stride);
  const std::vector<float> gate_bias_f32 = padded_bias(gate_bias, intermediate_size);
  const std::vector<float> up_bias_f32 = padded_bias(up_bias, intermediate_size);
  const std::vector<float> down_bias_f32 = padded_bias(down_bias, shape.hidden_size);

  for (int64_t token = 0; token < shape.tokens; token += block) {
    const int64_t tokens = std::min(block, shape.tokens - token);
    at::parallel_for(0, tokens, 1 + 32768 / hidden_cols, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        table.prepare(element(rows, (token + i) * rows.stride(0)), shape.hidden_size, hidden_cols,
                      x_rows.get() + i * hidden_cols * table.activation_bytes);
      }
    });
    for_panel_ranges(
        gate_panels, 2 * packed_panel_bytes(shape.format, shape.hidden_size),
        [&](int64_t begin, int64_t end) {
          table.gate_up({x_rows.get(), tokens, hidden_cols, gate_up.const_data_ptr(), begin, end,
                         data_or_null(gate_bias_f32), data_or_null(up_bias_f32),
                         static_cast<Activation>(shape.activation), h_rows.get(), h_stride});
        });
    void* out_rows = mutable_element(out, token * shape.hidden_size);
    for_panel_ranges(
        packed_panels(shape.hidden_size), packed_panel_bytes(shape.format, intermediate_size),
        [&](int64_t begin, int64_t end) {
          table.down({h_rows.get(), tokens, h_stride, intermediate_cols, down.const_data_ptr(),
                      begin, end, data_or_null(down_bias_f32), out_rows, shape.hidden_size});
        });
  }
  return out;
}

TORCH_LIBRARY_IMPL(fasttps, CPU, m) { m.impl("gate_up_silu_mlp", gate_up_silu_mlp); }

}  // namespace
}  // namespace fasttps::cpu
