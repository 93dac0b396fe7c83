#include "gate_up_silu_mlp.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>

#include "check.h"

namespace fasttps {
namespace {

constexpr const char* kOp = "gate_up_silu_mlp";
constexpr std::array<std::string_view, 3> kActivations{"silu", "gelu", "gelu_tanh"};

at::Tensor gate_up_silu_mlp_meta(const at::Tensor& x, const at::Tensor& gate_up,
                                 const at::Tensor& down, int64_t gate_up_format,
                                 int64_t down_format, int64_t intermediate_size,
                                 int64_t gate_up_group_size, int64_t down_group_size,
                                 std::string_view activation,
                                 const std::optional<at::Tensor>& gate_bias,
                                 const std::optional<at::Tensor>& up_bias,
                                 const std::optional<at::Tensor>& down_bias, bool int8_activation) {
  if (!has_symbolic_sizes(x)) {
    check_gate_up_silu_mlp({x, gate_up, down, gate_up_format, down_format, intermediate_size,
                            gate_up_group_size, down_group_size, activation, gate_bias, up_bias,
                            down_bias, int8_activation});
  }
  return empty_like_contiguous(x);
}

}  // namespace

GateUpSiluMlpShape check_gate_up_silu_mlp(const GateUpSiluMlpArgs& args) {
  const at::Tensor& x = args.x;
  check_given(kOp, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, kOp, ": x must be [..., hidden_size], got shape ", x.sizes());
  check_float_dtype(kOp, "x", x);
  check_dense_last_dim(kOp, "x", x);
  const int64_t hidden_size = x.size(-1);
  const int64_t intermediate_size = args.intermediate_size;
  TORCH_CHECK_VALUE(hidden_size >= 1, kOp, ": x must have a hidden_size of at least 1, got ",
                    x.sizes());
  TORCH_CHECK_VALUE(intermediate_size >= 1 && intermediate_size <= (int64_t{1} << 40) / hidden_size,
                    kOp, ": intermediate_size must be at least 1, got ", intermediate_size);
  const PackedFormat gate_up = check_format(kOp, "gate_up_format", args.gate_up_format);
  const PackedFormat down = check_format(kOp, "down_format", args.down_format);
  check_packed(kOp, "gate_up", args.gate_up, gate_up, 2 * packed_panels(intermediate_size),
               hidden_size, args.gate_up_group_size);
  check_packed(kOp, "down", args.down, down, packed_panels(hidden_size), intermediate_size,
               args.down_group_size);
  check_dtype_of_x(kOp, x, "gate_up", gate_up);
  check_dtype_of_x(kOp, x, "down", down);
  TORCH_CHECK_VALUE(!args.int8_activation || is_quantized(gate_up) || is_quantized(down), kOp,
                    ": int8_activation must be False for formats that are not quantised, got True");
  check_same_device(kOp, "gate_up", args.gate_up, "x", x);
  check_same_device(kOp, "down", args.down, "x", x);
  check_bias(kOp, "gate_bias", args.gate_bias, "[intermediate_size]", intermediate_size, x);
  check_bias(kOp, "up_bias", args.up_bias, "[intermediate_size]", intermediate_size, x);
  check_bias(kOp, "down_bias", args.down_bias, "[hidden_size]", hidden_size, x);
  return {gate_up,
          down,
          element_count(x) / hidden_size,
          hidden_size,
          intermediate_size,
          check_activation(kOp, args.activation)};
}

int check_activation(const char* op, std::string_view activation) {
  for (size_t i = 0; i < kActivations.size(); ++i) {
    if (activation == kActivations[i]) return static_cast<int>(i);
  }
  TORCH_CHECK_VALUE(false, op, ": activation must be silu, gelu or gelu_tanh, got '", activation,
                    "'");
}

at::Tensor empty_like_contiguous(const at::Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options().requires_grad(false));
}

TORCH_LIBRARY_IMPL(fasttps, Meta, m) { m.impl("gate_up_silu_mlp", gate_up_silu_mlp_meta); }

}  // namespace fasttps
