#pragma once
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <vector>

#include "packed_format.h"

namespace fasttps {

// A few new tokens of each sequence through `layers` decoder layers, and through the model's ends
// where they are given: embedding, final norm, lm_head, argmax. One layer:
//   x += o(attention(rope(q(n)), rope(k(n)), v(n)))   n = norm(x)
//   x += down(act(gate(m)) * up(m))                   m = norm(x)
//   norm(x) = x / sqrt(mean(x^2) + norm_eps) * weight (RMSNorm, arXiv:1910.07467)
// x stays in f32 from the first layer to the last.
//   input       int64 [batch, new_tokens] token ids, then `embedding` is given; or float
//               [batch, new_tokens, hidden_size]
//   weights     per layer q, k, v, o, gate_up, down, packed; formats and group_sizes name each
//   norms       per layer the input and the post-attention norm [hidden_size], and behind them the
//               final norm if it is to be applied; float
//   k_caches, v_caches  per layer [batch, num_kv_heads, max_seq_len, head_dim], as in attention.h;
//               written at slot seq_lens. With k_scales and v_scales, int8
//   seq_lens, cos, sin, kv_start, window, scale, interleaved   as in attention.h
//   biases      per layer of q, k, v, o, gate, up, down: [rows] float or None; or an empty list
//   embedding   packed [vocab_size, hidden_size]
//   lm_head     packed [vocab_size, hidden_size]; may be the embedding's own tensor
// Out: f32 logits [batch, new_tokens, vocab_size] with lm_head, else x [batch, new_tokens,
// hidden_size] in f32; .argmax: int64 [batch, new_tokens], the first of the largest logits.
struct DecodeStepArgs {
  const at::Tensor& input;
  at::TensorList weights;
  at::TensorList norms;
  const c10::List<std::optional<at::Tensor>>& biases;
  at::TensorList k_caches;
  at::TensorList v_caches;
  const at::Tensor& seq_lens;
  const at::Tensor& cos;
  const at::Tensor& sin;
  at::IntArrayRef formats;
  at::IntArrayRef group_sizes;
  int64_t num_heads;
  int64_t intermediate_size;
  double norm_eps;
  bool int8_activation;
  std::string_view activation;
  bool interleaved;
  std::optional<double> scale;
  std::optional<int64_t> window;
  const std::optional<at::Tensor>& kv_start;
  std::optional<at::TensorList> k_scales;
  std::optional<at::TensorList> v_scales;
  const std::optional<at::Tensor>& embedding;
  int64_t embedding_format;
  int64_t embedding_group_size;
  const std::optional<at::Tensor>& lm_head;
  int64_t lm_head_format;
  int64_t lm_head_group_size;
  int64_t vocab_size;
};

// The packed matrices of a layer, in the order of `weights`; gate and up are one.
enum DecoderMatrix { kQ, kK, kV, kO, kGateUp, kDown, kDecoderMatrices };
// The biases of a layer, in the order of `biases`.
enum DecoderBias { kBiasQ, kBiasK, kBiasV, kBiasO, kBiasGate, kBiasUp, kBiasDown, kDecoderBiases };

struct DecodeStepShape {
  int64_t batch, new_tokens, hidden_size, intermediate_size;
  int64_t num_heads, num_kv_heads, head_dim, max_seq_len, rotary_dim;
  int64_t layers;
  bool final_norm;
  int activation;
  std::vector<PackedFormat> formats;  // of `weights`

  int64_t rows(int matrix) const;  // gate_up: those of each half
  int64_t cols(int matrix) const;
};

// Rows of one KV head that a step may have: new_tokens * num_heads / num_kv_heads.
inline constexpr int64_t kMaxStepRows = 64;

DecodeStepShape check_decode_step(const DecodeStepArgs& args);

// Only what changes from token to token: of an input of the shape and type, and weights and caches,
// that check_decode_step has seen.
void check_decode_step_token(const DecodeStepArgs& args, DecodeStepShape& shape);

// What lies in host memory: slots that are free, ids that exist.
struct DecodeStepPositions {
  std::vector<int64_t> seq_lens, kv_start;
  std::vector<int64_t> ids;  // [batch * new_tokens], empty without an embedding
};
DecodeStepPositions check_decode_step_values(const DecodeStepArgs& args,
                                             const DecodeStepShape& shape);

at::Tensor empty_decode_step_result(const DecodeStepArgs& args, bool argmax);

}  // namespace fasttps
