#pragma once
#include "attention.h"

namespace fasttps {

// One or a few new tokens against a long cache, in one pass: RoPE on query and key, the write into
// the cache, QK^T, softmax, PV (FastTPS, paper 000, TPSFLAT). A cache row is read once for all
// query heads of its KV head; long contexts are split over threads and merged by (m, l, O) (paper
// 004). Arguments and result: attention.h.
inline constexpr char kRopeAttentionDecode[] = "rope_attention_decode";

}  // namespace fasttps
