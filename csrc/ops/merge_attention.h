#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

namespace fasttps {

// Attention over the union of disjoint sets of keys, from the attention over each: the (m, l, O)
// merge of paper 004 in the form lse = m + ln l, out = O / l.
//   lse = ln sum_p e^lse_p,   out = sum_p e^(lse_p - lse) out_p
//   outs  at least one f32 [batch, new_tokens, num_heads, head_dim], dense last dimension
//   lses  as many f32 [batch, num_heads, new_tokens], base e
// A part of lse -inf never contributes, whatever its out holds. Returns (out, lse), contiguous f32.
struct MergeAttentionShape {
  int64_t parts, batch, new_tokens, num_heads, head_dim;
};

MergeAttentionShape check_merge_attention(at::TensorList outs, at::TensorList lses);

std::tuple<at::Tensor, at::Tensor> empty_merge_attention_result(at::TensorList outs);

}  // namespace fasttps
