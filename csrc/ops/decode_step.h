#pragma once
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <vector>

#include "packed_format.h"

namespace fasttps {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

// A few new tokens of each sequence through `layers` decoder layers, and through the model's ends
// where they are given: embedding, final norm, lm_head, argmax. One layer:
//   x += r norm(o(attention(rope(norm(q(n))), rope(norm(k(n))), v(n))))   n = norm(x)
//   x += r norm(down(act(gate(m)) * up(m)))                               m = norm(x)
//   norm(x) = x / sqrt(mean(x^2) + norm_eps) * (weight + norm_offset)   (RMSNorm, arXiv:1910.07467)
// with a weight for each norm, None where it is not there, and r = residual_scale. x stays in f32
// from the first layer to the last.
//   input       int64 [batch, new_tokens] token ids, then `embedding` is given; or float
//               [batch, new_tokens, hidden_size]
//   weights     per layer q, k, v, o, gate_up, down, packed; formats and group_sizes name each
//   norms       per layer those before the attention and before the MLP [hidden_size], and behind
//               them the final norm if it is to be applied; float
//   head_norms  per layer those of q and k: [head_dim] for each head, or [heads * head_dim] over
//               all; or an empty list
//   out_norms   per layer those of what attention and MLP add [hidden_size]; or an empty list
//   k_caches, v_caches  per layer [batch, num_kv_heads, slots, head_dim], as in attention.h;
//               written at slot seq_lens. With k_scales and v_scales, int8
//   windows     none, one for all layers, or one a layer; 0: no window
//   ring        layers with a window keep rings of slots
//   cos, sin    [1 or batch, new_tokens, rotary_dim], or several of them, [tables, ...]
//   ropes       the table of each layer, -1: it does not rotate; or an empty list: the first
//   orders, columns  int64 [cols] lists of columns, and for each of weights but down the list in
//               whose order its columns lie, -1: in their own; or an empty list
//   seq_lens, kv_start, scale, softcap, interleaved   as in attention.h
//   biases      per layer of q, k, v, o, gate, up, down: [rows] float or None; or an empty list
//   embedding   packed [vocab_size, hidden_size]
//   lm_head     packed [vocab_size, hidden_size]; may be the embedding's own tensor
//   embedding_scale, logits_scale   factors of the embedding's rows and of the logits
//   logits_softcap  logits become softcap * tanh(logits / softcap)
// Out: f32 logits [batch, new_tokens, vocab_size] with lm_head, else x [batch, new_tokens,
// hidden_size] in f32; .argmax: int64 [batch, new_tokens], the first of the largest logits before
// their soft-cap.
struct DecodeStepArgs {
  const at::Tensor& input;
  at::TensorList weights;
  const OptionalTensors& norms;
  const OptionalTensors& biases;
  const OptionalTensors& head_norms;
  const OptionalTensors& out_norms;
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
  at::IntArrayRef windows;
  bool ring;
  const std::optional<at::Tensor>& kv_start;
  std::optional<at::TensorList> k_scales;
  std::optional<at::TensorList> v_scales;
  double norm_offset;
  at::IntArrayRef ropes;
  std::optional<at::TensorList> orders;
  at::IntArrayRef columns;
  std::optional<double> softcap;
  double residual_scale;
  const std::optional<at::Tensor>& embedding;
  int64_t embedding_format;
  int64_t embedding_group_size;
  double embedding_scale;
  const std::optional<at::Tensor>& lm_head;
  int64_t lm_head_format;
  int64_t lm_head_group_size;
  int64_t vocab_size;
  double logits_scale;
  std::optional<double> logits_softcap;
};

// The packed matrices of a layer, in the order of `weights`; gate and up are one.
enum DecoderMatrix { kQ, kK, kV, kO, kGateUp, kDown, kDecoderMatrices };
// The biases of a layer, in the order of `biases`.
enum DecoderBias { kBiasQ, kBiasK, kBiasV, kBiasO, kBiasGate, kBiasUp, kBiasDown, kDecoderBiases };

// What layers may differ in.
struct DecodeStepLayer {
  int64_t slots;       // of its cache
  int64_t window;      // 0: none
  bool ring;           // slot = position mod slots
  int64_t rope_table;  // -1: none
};

struct DecodeStepShape {
  int64_t batch, new_tokens, hidden_size, intermediate_size;
  int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
  int64_t rope_tables;
  std::vector<DecodeStepLayer> layers;
  bool final_norm;
  int activation;
  std::vector<PackedFormat> formats;  // of `weights`

  int64_t layer_count() const { return static_cast<int64_t>(layers.size()); }
  int64_t rows(int matrix) const;  // gate_up: those of each half
  int64_t cols(int matrix) const;
};

// Rows of one KV head that a step may have: new_tokens * num_heads / num_kv_heads.
inline constexpr int64_t kMaxStepRows = 64;

DecodeStepShape check_decode_step(const DecodeStepArgs& args);

// Its part that looks at what the model has learnt, with the shape that the other arguments state;
// fills in the formats.
void check_decode_step_parameters(const DecodeStepArgs& args, DecodeStepShape& shape);

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
