#include "rope_attention_decode.h"

#include <torch/library.h>

namespace fasttps {
namespace {

using Meta = AttentionEntry<kRopeAttentionDecode, attention_meta>;

TORCH_LIBRARY_IMPL(fasttps, Meta, m) {
  m.impl("rope_attention_decode", Meta::out);
  m.impl("rope_attention_decode.lse", Meta::lse);
}

}  // namespace
}  // namespace fasttps
