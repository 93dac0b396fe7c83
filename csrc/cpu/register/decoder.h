#pragma once
#include <cstdint>
#include <span>

#include "../kernel_table.h"
#include "../team.h"

// Decoder layers, and a model's ends, run by a team of threads that share one parallel region.
// Raw pointers, checked by the caller. Formula: ops/decode_step.h.
namespace fasttps::cpu {

// y = W x over packed panels of kPanelRows rows.
struct PackedMatrix {
  const void* packed = nullptr;
  int format = 0;
  const PackedLinearKernels* kernels = nullptr;
  int64_t rows = 0, cols = 0, cols_padded = 0;
  int64_t group_size = 0;
  int64_t panel_bytes = 0;         // of a panel, or of a pair of panels of gate and up
  int64_t panels = 0;              // or pairs
  const float* bias = nullptr;     // null or [rows padded to kPanelRows]
  const int32_t* order = nullptr;  // null or [cols]: the column of x that each of its own meets
  const float* up_bias = nullptr;  // of a gate_up matrix, whose `bias` is that of gate
};

struct NormWeight {
  const void* weight = nullptr;  // null: no norm
  ElementType type = kF32;
};

// One cache tensor [batch, num_kv_heads, max_seq_len, head_dim] of a layer; strides in elements.
struct CacheView {
  void* data;
  int64_t batch_stride, head_stride, slot_stride;
  float* scale;  // int8 caches: [batch, num_kv_heads, max_seq_len], else null
  int64_t scale_batch_stride, scale_head_stride, scale_slot_stride;
};

struct HeadNorm {
  NormWeight weight;
  bool over_all = false;  // one norm over all heads, not one a head
};

struct DecoderLayer {
  NormWeight input_norm, post_norm;             // before the attention, before the MLP
  NormWeight attention_out_norm, mlp_out_norm;  // of what they add
  HeadNorm q_norm, k_norm;
  PackedMatrix q, k, v, o, gate_up, down;
  CacheView k_cache, v_cache;
  int64_t window = 0;      // positions; past any length where there is none
  int64_t ring = 0;        // slots: slot = position mod ring; 0: slot = position
  int64_t rope_table = 0;  // -1: none
};

struct DecoderStep {
  int64_t batch, new_tokens, hidden_size, intermediate_size;
  int64_t num_heads, num_kv_heads, head_dim;
  ElementType cache_type;
  float norm_eps;
  float norm_offset;  // added to every weight of a norm
  float scale;
  float softcap;         // 0: none
  float residual_scale;  // of what attention and MLP add
  Activation activation;
  bool interleaved;
  int64_t rotary_dim;
  const float* cos;  // [tables, 1 or batch, new_tokens, rotary_dim]
  const float* sin;
  int64_t rope_table_stride, rope_batch_stride;  // floats; 0 where sequences share their rows
  const int64_t* seq_lens;                       // [batch]
  const int64_t* kv_start;                       // [batch]
  std::span<const DecoderLayer> layers;

  // Either ids and an embedding, or x holds the input when the step begins.
  const int64_t* ids = nullptr;  // [batch * new_tokens]
  PackedMatrix embedding;
  float embedding_scale = 1.0f;
  float* x = nullptr;  // [batch * new_tokens, hidden_size], the residual stream

  const NormWeight* final_norm = nullptr;
  PackedMatrix lm_head;     // kernels null: none
  float* logits = nullptr;  // [batch * new_tokens, lm_head.rows]
  float logits_scale = 1.0f, logits_softcap = 0.0f;
  int64_t* argmax = nullptr;  // null or [batch * new_tokens]

  int64_t tokens() const { return batch * new_tokens; }
};

// Runs the step on at most `threads` threads of torch's pool. Allocates before it starts.
void run_decoder_step(const DecoderStep& step, const KernelTable& kernels, int64_t threads);

}  // namespace fasttps::cpu
