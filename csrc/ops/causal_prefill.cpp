#include "causal_prefill.h"

#include <torch/library.h>

namespace fasttps {
namespace {

AttentionResult meta(const AttentionArgs& args, bool with_lse) {
  return empty_attention_result(args, check_attention(args), with_lse);
}

using Meta = AttentionEntry<kCausalPrefill, meta>;

TORCH_LIBRARY_IMPL(fasttps, Meta, m) {
  m.impl("causal_prefill", Meta::out);
  m.impl("causal_prefill.lse", Meta::lse);
}

}  // namespace
}  // namespace fasttps
