#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "packed_format.h"

namespace fasttps {

// act(x Wg^T + bg) * (x Wu^T + bu), then Wd^T + bd, in one op (FastTPS, paper 000, Fusion MLP).
//   x         [..., hidden_size] float32, bfloat16 or float16, dense last dimension
//   gate_up   packed [2 x intermediate_size, hidden_size], quantised or of x's dtype (pack_gate_up)
//   down      packed [hidden_size, intermediate_size], quantised or of x's dtype (pack_weight)
//   activation  silu, gelu or gelu_tanh
//   biases    [intermediate_size], [hidden_size]: float32 or x's dtype
//   int8_activation  what meets quantised weights is rounded to int8 by 32 columns
// Out: like x, contiguous. Sums in f32; with bf16 weights the intermediate may be rounded to bf16.
struct GateUpSiluMlpArgs {
  const at::Tensor& x;
  const at::Tensor& gate_up;
  const at::Tensor& down;
  int64_t gate_up_format;
  int64_t down_format;
  int64_t intermediate_size;
  int64_t gate_up_group_size;
  int64_t down_group_size;
  std::string_view activation;
  const std::optional<at::Tensor>& gate_bias;
  const std::optional<at::Tensor>& up_bias;
  const std::optional<at::Tensor>& down_bias;
  bool int8_activation;
};

struct GateUpSiluMlpShape {
  PackedFormat gate_up_format, down_format;
  int64_t tokens, hidden_size, intermediate_size;
  int activation;  // 0 silu, 1 gelu, 2 gelu_tanh
};

GateUpSiluMlpShape check_gate_up_silu_mlp(const GateUpSiluMlpArgs& args);

// 0 silu, 1 gelu, 2 gelu_tanh; throws ValueError for another name.
int check_activation(const char* op, std::string_view activation);

at::Tensor empty_like_contiguous(const at::Tensor& x);

}  // namespace fasttps
