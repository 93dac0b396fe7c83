#include "rope_attention_decode.h"

#include <torch/library.h>

namespace fasttps {
namespace {

AttentionResult meta(const AttentionArgs& args, bool with_lse) {
  return empty_attention_result(args, check_attention(args), with_lse);
}

using Meta = AttentionEntry<kRopeAttentionDecode, meta>;

TORCH_LIBRARY_IMPL(fasttps, Meta, m) {
  m.impl("rope_attention_decode", Meta::out);
  m.impl("rope_attention_decode.lse", Meta::lse);
}

}  // namespace
}  // namespace fasttps
