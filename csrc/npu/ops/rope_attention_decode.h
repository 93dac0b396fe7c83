#pragma once
#include "../machine.h"
#include "../program.h"

namespace fasttps::npu {

// Attention of one token over a cache that it is added to (FastTPS, paper 000, TPSFLAT, algorithm 3
// and appendix A): RoPE on queries and key of a head as one tensor, key and value to their places
// in the cache (GKVC), QK^T, softmax, PV. Scores and weights stay in a core's memory: of what the
// token makes, only its key and value go back to L3, and the result. Arguments, bf16 but for the
// table: query [num_heads, head_dim], key, value [num_kv_heads, head_dim], cos, sin [rotary_dim]
// f32 (in), k_cache, v_cache [num_kv_heads, max_seq_len, head_dim] (in and out), output [num_heads,
// head_dim] (out). Scalar: position, the slot of the token.
struct RopeAttentionDecodeSizes {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;
  int64_t max_seq_len;
  bool interleaved = false;
  double scale = 0;  // 0: head_dim^-1/2
};

// How heads are placed. H to H_b to 1: KV heads go to columns, and within one each to
// `cores_per_head` cores, to which its rows of the cache are broadcast, and which share its query
// heads; `lanes` shim channels serve the KV heads of a column in equal parts.
struct DecodePlacement {
  int columns;
  int heads_per_column;
  int cores_per_head;
  int lanes;
  int64_t waves;       // of heads, one after the other
  int64_t query_rows;  // of a core
  int64_t block_rows;  // of the cache, that are moved at once
  int64_t block_bytes;

  int heads_per_lane() const { return heads_per_column / lanes; }
  int64_t heads_per_wave() const { return int64_t{columns} * heads_per_column; }
};

struct LoweredDecode {
  Program program;
  DecodePlacement placement;
};

// Throws std::invalid_argument for sizes that are no attention's, Incompatible where heads do not
// divide over the columns or a row of scores does not fit a core.
LoweredDecode lower_rope_attention_decode(const RopeAttentionDecodeSizes& sizes,
                                          const Machine& machine);

}  // namespace fasttps::npu
