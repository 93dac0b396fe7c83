#include "causal_prefill.h"

#include <torch/library.h>

namespace fasttps {
namespace {

using Meta = AttentionEntry<kCausalPrefill, attention_meta>;

TORCH_LIBRARY_IMPL(fasttps, Meta, m) {
  m.impl("causal_prefill", Meta::out);
  m.impl("causal_prefill.lse", Meta::lse);
}

}  // namespace
}  // namespace fasttps
