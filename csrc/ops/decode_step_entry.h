#pragma once
#include "decode_step.h"

// Adapts an implementation of decode_step to the dispatcher's argument list.
namespace fasttps {

using DecodeStepImpl = at::Tensor (*)(const DecodeStepArgs& args, bool argmax);

// `impl<false>` serves the default overload, `impl<true>` .argmax.
template <DecodeStepImpl kImpl>
struct DecodeStepEntry {
  template <bool kArgmax>
  static at::Tensor impl(const at::Tensor& input, at::TensorList weights, at::TensorList norms,
                         const c10::List<std::optional<at::Tensor>>& biases,
                         at::TensorList k_caches, at::TensorList v_caches,
                         const at::Tensor& seq_lens, const at::Tensor& cos, const at::Tensor& sin,
                         at::IntArrayRef formats, at::IntArrayRef group_sizes, int64_t num_heads,
                         int64_t intermediate_size, double norm_eps, bool int8_activation,
                         std::string_view activation, bool interleaved, std::optional<double> scale,
                         std::optional<int64_t> window, const std::optional<at::Tensor>& kv_start,
                         std::optional<at::TensorList> k_scales,
                         std::optional<at::TensorList> v_scales,
                         const std::optional<at::Tensor>& embedding, int64_t embedding_format,
                         int64_t embedding_group_size, const std::optional<at::Tensor>& lm_head,
                         int64_t lm_head_format, int64_t lm_head_group_size, int64_t vocab_size) {
    return kImpl({input,
                  weights,
                  norms,
                  biases,
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
                  window,
                  kv_start,
                  k_scales,
                  v_scales,
                  embedding,
                  embedding_format,
                  embedding_group_size,
                  lm_head,
                  lm_head_format,
                  lm_head_group_size,
                  vocab_size},
                 kArgmax);
  }
};

}  // namespace fasttps
