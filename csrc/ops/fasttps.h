#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "packed_format.h"

// The ops for C++ programs: the functions of `torch.ops.fasttps`, with the types of their schemas.
// They go through PyTorch's dispatcher, so the device of the tensors decides what runs, and they
// are inference only. Shapes, dtypes and meaning: the Python functions in fasttps.ops, and the
// header of each op in the sources. Wrong calls throw c10::ValueError or c10::TypeError.
//
//   find_package(fasttps REQUIRED)    # CMAKE_PREFIX_PATH: fasttps.cmake_prefix_path
//   target_link_libraries(app PRIVATE fasttps::fasttps)
//
// What is optional goes in by name:
//   fasttps::rope_attention_decode(query, key, value, k_cache, v_cache, seq_lens,
//                                  {.cos = cos, .sin = sin, .window = 4096});
namespace fasttps {

struct CacheOptions {
  bool ring = false;                       // slot = position mod max_seq_len
  std::optional<at::Tensor> k_scale = {};  // f32 [batch, num_kv_heads, max_seq_len]: the
  std::optional<at::Tensor> v_scale = {};  // caches are int8
};

// Writes key and value into the caches at slot seq_lens.
void kv_cache_update_(at::Tensor k_cache, at::Tensor v_cache, const at::Tensor& key,
                      const at::Tensor& value, const at::Tensor& seq_lens,
                      const CacheOptions& options = {});

struct AttentionOptions {
  std::optional<at::Tensor> cos = {};  // both or neither; neither: already rotated
  std::optional<at::Tensor> sin = {};
  bool interleaved = false;
  std::optional<double> scale = {};  // default head_dim^-0.5
  std::optional<at::Tensor> attn_mask = {};
  std::optional<at::Tensor> kv_start = {};
  std::optional<at::Tensor> query_start = {};  // default seq_lens
  std::optional<int64_t> window = {};
  std::optional<double> softcap = {};
  std::optional<at::Tensor> sinks = {};
  bool ring = false;
  std::optional<at::Tensor> k_scale = {};
  std::optional<at::Tensor> v_scale = {};
};

// Rotates query and key, writes key and value into the caches, attends to them. Key and value both
// absent: attends only. Returns [batch, new_tokens, num_heads, head_dim].
at::Tensor rope_attention_decode(const at::Tensor& query, const std::optional<at::Tensor>& key,
                                 const std::optional<at::Tensor>& value, at::Tensor k_cache,
                                 at::Tensor v_cache, const at::Tensor& seq_lens,
                                 const AttentionOptions& options = {});
at::Tensor causal_prefill(const at::Tensor& query, const std::optional<at::Tensor>& key,
                          const std::optional<at::Tensor>& value, at::Tensor k_cache,
                          at::Tensor v_cache, const at::Tensor& seq_lens,
                          const AttentionOptions& options = {});

// The same, returning f32 (out, lse [batch, num_heads, new_tokens] in base e).
std::tuple<at::Tensor, at::Tensor> rope_attention_decode_lse(const at::Tensor& query,
                                                             const std::optional<at::Tensor>& key,
                                                             const std::optional<at::Tensor>& value,
                                                             at::Tensor k_cache, at::Tensor v_cache,
                                                             const at::Tensor& seq_lens,
                                                             const AttentionOptions& options = {});
std::tuple<at::Tensor, at::Tensor> causal_prefill_lse(const at::Tensor& query,
                                                      const std::optional<at::Tensor>& key,
                                                      const std::optional<at::Tensor>& value,
                                                      at::Tensor k_cache, at::Tensor v_cache,
                                                      const at::Tensor& seq_lens,
                                                      const AttentionOptions& options = {});

// Attention over the union of disjoint sets of keys, from the (out, lse) over each.
std::tuple<at::Tensor, at::Tensor> merge_attention(at::TensorList outs, at::TensorList lses);

// Weights in the panel layout of packed_format.h, and back: exactly where the format has a dtype.
at::Tensor pack_weight(const at::Tensor& weight, PackedFormat format, int64_t group_size = 0);
at::Tensor unpack_weight(const at::Tensor& packed, PackedFormat format, int64_t rows, int64_t cols,
                         int64_t group_size = 0);
at::Tensor pack_gate_up(const at::Tensor& gate, const at::Tensor& up, PackedFormat format,
                        int64_t group_size = 0);
std::tuple<at::Tensor, at::Tensor> unpack_gate_up(const at::Tensor& packed, PackedFormat format,
                                                  int64_t rows, int64_t cols,
                                                  int64_t group_size = 0);

// GGUF blocks uint8 [rows, bytes of a row] in the same layout: Q4_0, Q4_1, Q8_0, Q4_K, Q6_K for
// kInt4, kInt4Min, kInt8Group, kQ4K, kQ6K; groups of 32 for the first three.
at::Tensor pack_gguf(const at::Tensor& blocks, PackedFormat format, int64_t rows, int64_t cols);

// Quants uint8 [rows, cols] of kInt8, kInt4, kInt8Group or kInt4Zero, and their scales [rows,
// groups] (f16; f32 for kInt8) and, for kInt4Zero, zeros uint8 [rows, groups], in the same layout.
at::Tensor pack_quants(const at::Tensor& quants, const at::Tensor& scales,
                       const std::optional<at::Tensor>& zeros, PackedFormat format,
                       int64_t group_size = 0);

struct LinearOptions {
  PackedFormat format;
  int64_t rows;
  int64_t group_size = 0;
  bool int8_activation = false;
  std::optional<at::Tensor> bias = {};
};

// x W^T + bias over a packed weight; x [..., cols], out [..., rows].
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed,
                         const LinearOptions& options);

struct EmbeddingOptions {
  PackedFormat format;
  int64_t rows;
  int64_t cols;
  at::ScalarType dtype;
  int64_t group_size = 0;
};

// Rows `ids` of a packed weight; out [..., cols].
at::Tensor packed_embedding(const at::Tensor& ids, const at::Tensor& packed,
                            const EmbeddingOptions& options);

struct MlpOptions {
  PackedFormat gate_up_format;
  PackedFormat down_format;
  int64_t intermediate_size;
  int64_t gate_up_group_size = 0;
  int64_t down_group_size = 0;
  bool int8_activation = false;     // for the quantised weights
  std::string activation = "silu";  // or gelu, gelu_tanh
  std::optional<at::Tensor> gate_bias = {};
  std::optional<at::Tensor> up_bias = {};
  std::optional<at::Tensor> down_bias = {};
};

// down(act(gate(x)) * up(x)) over packed weights; x [..., hidden_size].
at::Tensor gate_up_silu_mlp(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                            const MlpOptions& options);

// A packed weight, as decode_step takes it.
struct PackedWeight {
  at::Tensor packed;
  PackedFormat format;
  int64_t group_size = 0;
};

// One decoder layer. Norms are [hidden_size], those of q and k [head_dim] or of all heads; caches
// [batch, num_kv_heads, slots, head_dim].
struct DecoderLayerWeights {
  std::optional<at::Tensor> input_norm, post_norm;  // before the attention, before the MLP
  PackedWeight q, k, v, o, gate_up, down;
  at::Tensor k_cache, v_cache;
  std::optional<at::Tensor> q_norm = {}, k_norm = {};
  std::optional<at::Tensor> attention_out_norm = {}, mlp_out_norm = {};  // of what they add
  int64_t window = 0;                                                    // positions; 0: none
  int64_t rope = 0;  // table of cos and sin; -1: none
};

struct DecodeStepOptions {
  int64_t num_heads;
  int64_t intermediate_size;
  double norm_eps;
  bool int8_activation = false;
  std::string activation = "silu";  // or gelu, gelu_tanh
  bool interleaved = false;
  std::optional<double> scale = {};  // default head_dim^-0.5
  bool ring = false;                 // layers with a window keep rings: slot = position mod slots
  std::optional<at::Tensor> kv_start = {};
  double norm_offset = 0.0;  // added to the weights of all norms
  std::optional<double> softcap = {};
  double residual_scale = 1.0;  // of what attention and MLP add
  std::optional<at::Tensor> final_norm = {};
  std::optional<PackedWeight> embedding = {};  // with token ids
  std::optional<PackedWeight> lm_head = {};
  int64_t vocab_size = 0;  // of embedding and lm_head
  double embedding_scale = 1.0;
  double logits_scale = 1.0;
  std::optional<double> logits_softcap = {};
};

// A few new tokens through decoder layers, and the model's ends where they are given, as one op.
// input: int64 [batch, new_tokens] ids, or [batch, new_tokens, hidden_size]. Writes the caches.
// Returns f32 logits with lm_head, else the hidden states; decode_step_argmax the likeliest ids.
at::Tensor decode_step(const at::Tensor& input, c10::ArrayRef<DecoderLayerWeights> layers,
                       const at::Tensor& seq_lens, const at::Tensor& cos, const at::Tensor& sin,
                       const DecodeStepOptions& options);
at::Tensor decode_step_argmax(const at::Tensor& input, c10::ArrayRef<DecoderLayerWeights> layers,
                              const at::Tensor& seq_lens, const at::Tensor& cos,
                              const at::Tensor& sin, const DecodeStepOptions& options);

}  // namespace fasttps
