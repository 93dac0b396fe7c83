#pragma once
#include "attention.h"

namespace fasttps {

// Many new tokens, on an empty or a filled cache: RoPE, the write into the cache, tiled attention
// with online softmax in base 2; tiles that nobody may see are skipped and the rest dealt out so
// that every worker gets the same number (STEEL, paper 002). Same numbers as rope_attention_decode
// to rounding. Arguments and result: attention.h.
inline constexpr char kCausalPrefill[] = "causal_prefill";

}  // namespace fasttps
