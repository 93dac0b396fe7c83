#pragma once
#include "decode_step.h"

// Adapts an implementation of decode_step to the dispatcher's argument list.
namespace fasttps {

using DecodeStepImpl = at::Tensor (*)(const DecodeStepArgs& args, bool argmax);

// `impl<false>` serves the default overload, `impl<true>` .argmax.
template <DecodeStepImpl kImpl>
struct DecodeStepEntry {
  template <bool kArgmax>
  static at::Tensor impl(
      const at::Tensor& input, at::TensorList weights, const OptionalTensors& norms,
      const OptionalTensors& biases, const OptionalTensors& head_norms,
      const OptionalTensors& out_norms, at::TensorList k_caches, at::TensorList v_caches,
      const at::Tensor& seq_lens, const at::Tensor& cos, const at::Tensor& sin,
      at::IntArrayRef formats, at::IntArrayRef group_sizes, int64_t num_heads,
      int64_t intermediate_size, double norm_eps, bool int8_activation, std::string_view activation,
      bool interleaved, std::optional<double> scale, at::IntArrayRef windows, bool ring,
      const std::optional<at::Tensor>& kv_start, std::optional<at::TensorList> k_scales,
      std::optional<at::TensorList> v_scales, double norm_offset, at::IntArrayRef ropes,
      std::optional<at::TensorList> orders, at::IntArrayRef columns, std::optional<double> softcap,
      double residual_scale, const std::optional<at::Tensor>& embedding, int64_t embedding_format,
      int64_t embedding_group_size, double embedding_scale,
      const std::optional<at::Tensor>& lm_head, int64_t lm_head_format, int64_t lm_head_group_size,
      int64_t vocab_size, double logits_scale, std::optional<double> logits_softcap) {
    return kImpl({input,
                  weights,
                  norms,
                  biases,
                  head_norms,
                  out_norms,
                  k_caches,
                  v_caches,
                  seq_lens,
                  cos,
                  sin,
                  formats,
                  group_sizes,
                  num_heads,
                  intermediate_size,
                  norm_eps,
                  int8_activation,
                  activation,
                  interleaved,
                  scale,
                  windows,
                  ring,
                  kv_start,
                  k_scales,
                  v_scales,
                  norm_offset,
                  ropes,
                  orders,
                  columns,
                  softcap,
                  residual_scale,
                  embedding,
                  embedding_format,
                  embedding_group_size,
                  embedding_scale,
                  lm_head,
                  lm_head_format,
                  lm_head_group_size,
                  vocab_size,
                  logits_scale,
                  logits_softcap},
                 kArgmax);
  }
};

}  // namespace fasttps
