#pragma once
#include "../machine.h"
#include "../program.h"

namespace fasttps::npu {

// Global KV cache management (paper 000, section 3.1.1 and equation 2): new keys and values go
// straight to their places in caches that were allocated once. Nothing that was there is read.
//   slot of head h, token t:  h * max_seq_len * head_dim + (position + t) * head_dim
// Arguments: key, value [batch, new_tokens, num_kv_heads, head_dim] (in), k_cache, v_cache [batch,
// num_kv_heads, max_seq_len, head_dim] (in and out); bf16, dense. Scalars: position of each
// sequence, that is the slot of its first new token.
struct KvCacheUpdateSizes {
  int64_t batch;
  int64_t new_tokens;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t max_seq_len;
};

// Keys pass through the mem tile of one column, values through that of another, L3 to L2 to L3.
// Throws std::invalid_argument for sizes that are no cache's, Incompatible where a token's heads do
// not fit a mem tile.
Program lower_kv_cache_update(const KvCacheUpdateSizes& sizes, const Machine& machine);

}  // namespace fasttps::npu
