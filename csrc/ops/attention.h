#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

// What rope_attention_decode and causal_prefill have in common: arguments, meaning, checks.
namespace fasttps {

// Shapes (d = head_dim; every tensor may have any strides with a dense last dimension):
//   query            [batch, new_tokens, num_heads, d] float32, bfloat16 or float16
//   key, value       [batch, new_tokens, num_kv_heads, d], or both absent: attend only
//   k_cache, v_cache [batch, num_kv_heads, max_seq_len, d], of query's dtype or int8
//   seq_lens         int64 [] or [batch]: tokens already in the cache. Written: none. The cache
//                    then holds kv_len = seq_lens + new_tokens positions, seq_lens if key is absent
//   cos, sin         [1 or batch, new_tokens, rotary_dim], float32 or query's dtype; absent: query
//                    and key are already rotated. x cos + rotate(x) sin on the first rotary_dim
//                    elements, rotate(x) = (-x2, x1) on halves or (-x[2i+1], x[2i]) if interleaved
//   scale            default d^-0.5
//   attn_mask        bool [batch|1, num_heads|1, new_tokens, T], true = attend, indexed by slot
//   kv_start         int64 [batch]: first position that may be attended (left padding)
//   query_start      int64 [] or [batch], default seq_lens: query i sees positions up to
//                    query_start + i; may be negative (nothing) or past the end (not causal)
//   window           query i sees the last `window` positions up to its limit
//   softcap          score = softcap * tanh(score / softcap)
//   sinks            [num_heads]: a further logit in the softmax denominator, without a value
//   ring             slot = position mod max_seq_len; needs window + new_tokens - 1 <= max_seq_len
//   k_scale, v_scale f32 [batch, num_kv_heads, max_seq_len] for int8 caches
// Out: [batch, new_tokens, num_heads, d] contiguous, of query's dtype; the .lse overloads give f32
// out and f32 lse [batch, num_heads, new_tokens] in base e, sink included. A row that may see
// nothing gives 0, and -inf (or its sink).
struct AttentionArgs {
  const char* op;
  const at::Tensor& query;
  const std::optional<at::Tensor>& key;
  const std::optional<at::Tensor>& value;
  at::Tensor& k_cache;
  at::Tensor& v_cache;
  const at::Tensor& seq_lens;
  const std::optional<at::Tensor>& cos;
  const std::optional<at::Tensor>& sin;
  bool interleaved;
  std::optional<double> scale;
  const std::optional<at::Tensor>& attn_mask;
  const std::optional<at::Tensor>& kv_start;
  const std::optional<at::Tensor>& query_start;
  std::optional<int64_t> window;
  std::optional<double> softcap;
  const std::optional<at::Tensor>& sinks;
  bool ring;
  const std::optional<at::Tensor>& k_scale;
  const std::optional<at::Tensor>& v_scale;
};

struct AttentionShape {
  int64_t batch, new_tokens, num_heads, num_kv_heads, head_dim, max_seq_len;
  int64_t rotary_dim;  // 0: already rotated
  bool appends;        // key and value are given
};

// The one check of both ops for all devices: shapes, dtypes, devices, strides.
AttentionShape check_attention(const AttentionArgs& args);

// Per sequence, read from host memory.
struct AttentionPositions {
  std::vector<int64_t> seq_lens;
  std::vector<int64_t> kv_len;
  std::vector<int64_t> query_start;  // clamped to what fits additions
  std::vector<int64_t> kv_start;     // 0 if absent, at most kv_len
};

// Reads and checks the values that lie in host memory.
AttentionPositions check_attention_positions(const AttentionArgs& args,
                                             const AttentionShape& shape);

using AttentionResult = std::tuple<at::Tensor, at::Tensor>;
AttentionResult empty_attention_result(const AttentionArgs& args, bool with_lse);

// The Meta kernel of both: checks, then returns empty tensors.
AttentionResult attention_meta(const AttentionArgs& args, bool with_lse);

// Adapts `kImpl` to the dispatcher's argument list: `out` for the default overload, `lse` for .lse.
using AttentionImpl = AttentionResult (*)(const AttentionArgs& args, bool with_lse);
using OptionalTensor = std::optional<at::Tensor>;

template <const char* kOp, AttentionImpl kImpl>
struct AttentionEntry {
  static AttentionResult lse(const at::Tensor& query, const OptionalTensor& key,
                             const OptionalTensor& value, at::Tensor& k_cache, at::Tensor& v_cache,
                             const at::Tensor& seq_lens, const OptionalTensor& cos,
                             const OptionalTensor& sin, bool interleaved,
                             std::optional<double> scale, const OptionalTensor& attn_mask,
                             const OptionalTensor& kv_start, const OptionalTensor& query_start,
                             std::optional<int64_t> window, std::optional<double> softcap,
                             const OptionalTensor& sinks, bool ring, const OptionalTensor& k_scale,
                             const OptionalTensor& v_scale) {
    return kImpl({kOp,    query,   key,         value, k_cache,   v_cache,  seq_lens,
                  cos,    sin,     interleaved, scale, attn_mask, kv_start, query_start,
                  window, softcap, sinks,       ring,  k_scale,   v_scale},
                 true);
  }
  static at::Tensor out(const at::Tensor& query, const OptionalTensor& key,
                        const OptionalTensor& value, at::Tensor& k_cache, at::Tensor& v_cache,
                        const at::Tensor& seq_lens, const OptionalTensor& cos,
                        const OptionalTensor& sin, bool interleaved, std::optional<double> scale,
                        const OptionalTensor& attn_mask, const OptionalTensor& kv_start,
                        const OptionalTensor& query_start, std::optional<int64_t> window,
                        std::optional<double> softcap, const OptionalTensor& sinks, bool ring,
                        const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
    return std::get<0>(kImpl({kOp,    query,   key,         value, k_cache,   v_cache,  seq_lens,
                              cos,    sin,     interleaved, scale, attn_mask, kv_start, query_start,
                              window, softcap, sinks,       ring,  k_scale,   v_scale},
                             false));
  }
};

}  // namespace fasttps
