#include "fasttps.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>
#include <vector>

namespace fasttps {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using TensorPair = std::tuple<at::Tensor, at::Tensor>;

// The op `name`, with the C++ types that its kernels have.
template <class Function>
c10::TypedOperatorHandle<Function> op(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Function>();
}

template <class Result>
using Attention = Result(const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                         at::Tensor&, at::Tensor&, const at::Tensor&, const OptionalTensor&,
                         const OptionalTensor&, bool, std::optional<double>, const OptionalTensor&,
                         const OptionalTensor&, const OptionalTensor&, std::optional<int64_t>,
                         std::optional<double>, const OptionalTensor&, bool, const OptionalTensor&,
                         const OptionalTensor&);

template <class Result>
Result call(const c10::TypedOperatorHandle<Attention<Result>>& op, const at::Tensor& query,
            const OptionalTensor& key, const OptionalTensor& value, at::Tensor& k_cache,
            at::Tensor& v_cache, const at::Tensor& seq_lens, const AttentionOptions& o) {
  return op.call(query, key, value, k_cache, v_cache, seq_lens, o.cos, o.sin, o.interleaved,
                 o.scale, o.attn_mask, o.kv_start, o.query_start, o.window, o.softcap, o.sinks,
                 o.ring, o.k_scale, o.v_scale);
}

}  // namespace

void kv_cache_update_(at::Tensor k_cache, at::Tensor v_cache, const at::Tensor& key,
                      const at::Tensor& value, const at::Tensor& seq_lens,
                      const CacheOptions& options) {
  static const auto update =
      op<void(at::Tensor&, at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
              bool, const OptionalTensor&, const OptionalTensor&)>("fasttps::kv_cache_update_");
  update.call(k_cache, v_cache, key, value, seq_lens, options.ring, options.k_scale,
              options.v_scale);
}

at::Tensor rope_attention_decode(const at::Tensor& query, const OptionalTensor& key,
                                 const OptionalTensor& value, at::Tensor k_cache,
                                 at::Tensor v_cache, const at::Tensor& seq_lens,
                                 const AttentionOptions& options) {
  static const auto decode = op<Attention<at::Tensor>>("fasttps::rope_attention_decode");
  return call(decode, query, key, value, k_cache, v_cache, seq_lens, options);
}

TensorPair rope_attention_decode_lse(const at::Tensor& query, const OptionalTensor& key,
                                     const OptionalTensor& value, at::Tensor k_cache,
                                     at::Tensor v_cache, const at::Tensor& seq_lens,
                                     const AttentionOptions& options) {
  static const auto decode = op<Attention<TensorPair>>("fasttps::rope_attention_decode", "lse");
  return call(decode, query, key, value, k_cache, v_cache, seq_lens, options);
}

at::Tensor causal_prefill(const at::Tensor& query, const OptionalTensor& key,
                          const OptionalTensor& value, at::Tensor k_cache, at::Tensor v_cache,
                          const at::Tensor& seq_lens, const AttentionOptions& options) {
  static const auto prefill = op<Attention<at::Tensor>>("fasttps::causal_prefill");
  return call(prefill, query, key, value, k_cache, v_cache, seq_lens, options);
}

TensorPair causal_prefill_lse(const at::Tensor& query, const OptionalTensor& key,
                              const OptionalTensor& value, at::Tensor k_cache, at::Tensor v_cache,
                              const at::Tensor& seq_lens, const AttentionOptions& options) {
  static const auto prefill = op<Attention<TensorPair>>("fasttps::causal_prefill", "lse");
  return call(prefill, query, key, value, k_cache, v_cache, seq_lens, options);
}

TensorPair merge_attention(at::TensorList outs, at::TensorList lses) {
  static const auto merge =
      op<TensorPair(at::TensorList, at::TensorList)>("fasttps::merge_attention");
  return merge.call(outs, lses);
}

at::Tensor pack_weight(const at::Tensor& weight, PackedFormat format, int64_t group_size) {
  static const auto pack =
      op<at::Tensor(const at::Tensor&, int64_t, int64_t)>("fasttps::pack_weight");
  return pack.call(weight, static_cast<int64_t>(format), group_size);
}

at::Tensor unpack_weight(const at::Tensor& packed, PackedFormat format, int64_t rows, int64_t cols,
                         int64_t group_size) {
  static const auto unpack = op<at::Tensor(const at::Tensor&, int64_t, int64_t, int64_t, int64_t)>(
      "fasttps::unpack_weight");
  return unpack.call(packed, static_cast<int64_t>(format), rows, cols, group_size);
}

at::Tensor pack_gate_up(const at::Tensor& gate, const at::Tensor& up, PackedFormat format,
                        int64_t group_size) {
  static const auto pack = op<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, int64_t)>(
      "fasttps::pack_gate_up");
  return pack.call(gate, up, static_cast<int64_t>(format), group_size);
}

TensorPair unpack_gate_up(const at::Tensor& packed, PackedFormat format, int64_t rows, int64_t cols,
                          int64_t group_size) {
  static const auto unpack = op<TensorPair(const at::Tensor&, int64_t, int64_t, int64_t, int64_t)>(
      "fasttps::unpack_gate_up");
  return unpack.call(packed, static_cast<int64_t>(format), rows, cols, group_size);
}

at::Tensor pack_gguf(const at::Tensor& blocks, PackedFormat format, int64_t rows, int64_t cols) {
  static const auto pack =
      op<at::Tensor(const at::Tensor&, int64_t, int64_t, int64_t)>("fasttps::pack_gguf");
  return pack.call(blocks, static_cast<int64_t>(format), rows, cols);
}

at::Tensor pack_quants(const at::Tensor& quants, const at::Tensor& scales,
                       const OptionalTensor& zeros, PackedFormat format, int64_t group_size) {
  static const auto pack =
      op<at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, int64_t, int64_t)>(
          "fasttps::pack_quants");
  return pack.call(quants, scales, zeros, static_cast<int64_t>(format), group_size);
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, const LinearOptions& o) {
  static const auto linear =
      op<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t, bool,
                    const OptionalTensor&)>("fasttps::packed_linear");
  return linear.call(x, packed, static_cast<int64_t>(o.format), o.rows, o.group_size,
                     o.int8_activation, o.bias);
}

at::Tensor packed_embedding(const at::Tensor& ids, const at::Tensor& packed,
                            const EmbeddingOptions& o) {
  static const auto embedding =
      op<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t, at::ScalarType,
                    int64_t)>("fasttps::packed_embedding");
  return embedding.call(ids, packed, static_cast<int64_t>(o.format), o.rows, o.cols, o.dtype,
                        o.group_size);
}

at::Tensor gate_up_silu_mlp(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                            const MlpOptions& options) {
  static const auto mlp =
      op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t,
                    int64_t, int64_t, int64_t, std::string_view, const OptionalTensor&,
                    const OptionalTensor&, const OptionalTensor&, bool)>(
          "fasttps::gate_up_silu_mlp");
  return mlp.call(x, gate_up, down, static_cast<int64_t>(options.gate_up_format),
                  static_cast<int64_t>(options.down_format), options.intermediate_size,
                  options.gate_up_group_size, options.down_group_size, options.activation,
                  options.gate_bias, options.up_bias, options.down_bias, options.int8_activation);
}

namespace {

at::Tensor call_decode_step(const char* overload, const at::Tensor& input,
                            c10::ArrayRef<DecoderLayerWeights> layers, const at::Tensor& seq_lens,
                            const at::Tensor& cos, const at::Tensor& sin,
                            const DecodeStepOptions& o) {
  std::vector<at::Tensor> weights, k_caches, v_caches;
  c10::List<OptionalTensor> norms, head_norms, out_norms;
  std::vector<int64_t> formats, group_sizes, windows, ropes;
  for (const DecoderLayerWeights& layer : layers) {
    for (const PackedWeight* w :
         {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate_up, &layer.down}) {
      weights.push_back(w->packed);
      formats.push_back(static_cast<int64_t>(w->format));
      group_sizes.push_back(w->group_size);
    }
    for (const auto& norm : {layer.input_norm, layer.post_norm}) norms.push_back(norm);
    for (const auto& norm : {layer.q_norm, layer.k_norm}) head_norms.push_back(norm);
    for (const auto& norm : {layer.attention_out_norm, layer.mlp_out_norm}) {
      out_norms.push_back(norm);
    }
    windows.push_back(layer.window);
    ropes.push_back(layer.rope);
    k_caches.push_back(layer.k_cache);
    v_caches.push_back(layer.v_cache);
  }
  if (o.final_norm) norms.push_back(o.final_norm);
  const auto packed = [](const std::optional<PackedWeight>& w) {
    return w ? OptionalTensor(w->packed) : std::nullopt;
  };
  const auto format = [](const std::optional<PackedWeight>& w) {
    return w ? static_cast<int64_t>(w->format) : 0;
  };
  const auto group_size = [](const std::optional<PackedWeight>& w) {
    return w ? w->group_size : 0;
  };
  using Norms = c10::List<OptionalTensor>;
  using Step = at::Tensor(
      const at::Tensor&, at::TensorList, const Norms&, const Norms&, const Norms&, const Norms&,
      at::TensorList, at::TensorList, const at::Tensor&, const at::Tensor&, const at::Tensor&,
      at::IntArrayRef, at::IntArrayRef, int64_t, int64_t, double, bool, std::string_view, bool,
      std::optional<double>, at::IntArrayRef, bool, const OptionalTensor&,
      std::optional<at::TensorList>, std::optional<at::TensorList>, double, at::IntArrayRef,
      std::optional<at::TensorList>, at::IntArrayRef, std::optional<double>, double,
      const OptionalTensor&, int64_t, int64_t, double, const OptionalTensor&, int64_t, int64_t,
      int64_t, double, std::optional<double>);
  return op<Step>("fasttps::decode_step", overload)
      .call(input, weights, norms, Norms(), head_norms, out_norms, k_caches, v_caches, seq_lens,
            cos, sin, formats, group_sizes, o.num_heads, o.intermediate_size, o.norm_eps,
            o.int8_activation, o.activation, o.interleaved, o.scale, windows, o.ring, o.kv_start,
            std::nullopt, std::nullopt, o.norm_offset, ropes, std::nullopt, at::IntArrayRef(),
            o.softcap, o.residual_scale, packed(o.embedding), format(o.embedding),
            group_size(o.embedding), o.embedding_scale, packed(o.lm_head), format(o.lm_head),
            group_size(o.lm_head), o.vocab_size, o.logits_scale, o.logits_softcap);
}

}  // namespace

at::Tensor decode_step(const at::Tensor& input, c10::ArrayRef<DecoderLayerWeights> layers,
                       const at::Tensor& seq_lens, const at::Tensor& cos, const at::Tensor& sin,
                       const DecodeStepOptions& options) {
  return call_decode_step("", input, layers, seq_lens, cos, sin, options);
}

at::Tensor decode_step_argmax(const at::Tensor& input, c10::ArrayRef<DecoderLayerWeights> layers,
                              const at::Tensor& seq_lens, const at::Tensor& cos,
                              const at::Tensor& sin, const DecodeStepOptions& options) {
  return call_decode_step("argmax", input, layers, seq_lens, cos, sin, options);
}

}  // namespace fasttps
