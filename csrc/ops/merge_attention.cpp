#include "merge_attention.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "check.h"

namespace fasttps {
namespace {

constexpr const char* kOp = "merge_attention";

std::tuple<at::Tensor, at::Tensor> merge_attention_meta(at::TensorList outs, at::TensorList lses) {
  const bool symbolic = std::any_of(outs.begin(), outs.end(), has_symbolic_sizes);
  if (!symbolic) check_merge_attention(outs, lses);
  return empty_merge_attention_result(outs);
}

}  // namespace

MergeAttentionShape check_merge_attention(at::TensorList outs, at::TensorList lses) {
  TORCH_CHECK_VALUE(!outs.empty(), kOp, ": outs must hold at least one part, got none");
  TORCH_CHECK_VALUE(outs.size() == lses.size(), kOp, ": lses must hold one part for each of the ",
                    outs.size(), " outs, got ", lses.size());
  const char* layout = "[batch, new_tokens, num_heads, head_dim]";
  const auto [batch, new_tokens, num_heads, head_dim] = dims<4>(kOp, "outs[0]", outs[0], layout);
  for (size_t p = 0; p < outs.size(); ++p) {
    const std::string out = "outs[" + std::to_string(p) + "]";
    const std::string lse = "lses[" + std::to_string(p) + "]";
    check_sizes(kOp, out.c_str(), outs[p], layout, outs[0].sizes());
    check_sizes(kOp, lse.c_str(), lses[p], "[batch, num_heads, new_tokens]",
                {batch, num_heads, new_tokens});
    for (const auto& [arg, t] : {std::pair{&out, &outs[p]}, std::pair{&lse, &lses[p]}}) {
      check_dtype(kOp, arg->c_str(), *t, {at::kFloat});
      check_same_device(kOp, arg->c_str(), *t, "outs[0]", outs[0]);
    }
    check_dense_last_dim(kOp, out.c_str(), outs[p]);
  }
  return {static_cast<int64_t>(outs.size()), batch, new_tokens, num_heads, head_dim};
}

std::tuple<at::Tensor, at::Tensor> empty_merge_attention_result(at::TensorList outs) {
  const at::Tensor& out = outs[0];
  const auto options = out.options().requires_grad(false);
  return {at::empty_symint(out.sym_sizes(), options),
          at::empty_symint({out.sym_size(0), out.sym_size(2), out.sym_size(1)}, options)};
}

TORCH_LIBRARY_IMPL(fasttps, Meta, m) { m.impl("merge_attention", merge_attention_meta); }

}  // namespace fasttps
