#pragma once
#include <array>
#include <vector>

#include "../machine.h"
#include "../program.h"

namespace fasttps::npu {

// Attention of many tokens over keys and values that lie in the cache (STEEL, paper 002, algorithm
// 1): pipelines of three cores, scores, softmax and values, of which each has a block of 64 queries
// at a time, and to which blocks of 64 keys and values are broadcast. Queries and keys are rotated.
// Arguments, bf16: query [padded_tokens, num_heads, head_dim] (in), k_cache, v_cache [num_kv_heads,
// max_seq_len, head_dim] (in and out, here read), output as query (out).
struct CausalPrefillSizes {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t tokens;
  int64_t offset = 0;  // tokens before them in the cache
  int64_t max_seq_len;
  double scale = 0;  // 0: head_dim^-1/2
  // Section IV-C: pipelines of a group take blocks of queries in turn, which have about as many
  // keys; false: each takes a stretch of its own, and all wait for the one with the most.
  bool sparsity_aware = true;
  // Whether each group of pipelines, which shares a mem tile for its queries, has keys and values
  // broadcast on its own; false: all have one broadcast.
  bool broadcast_to_groups = true;
};

struct PrefillPlacement {
  // Cores of each pipeline: scores, softmax, values.
  std::vector<std::array<Tile, 3>> pipelines;
  int group;              // pipelines that share a mem tile for queries and one for results
  int64_t rounds;         // blocks of queries of each pipeline
  int64_t padded_tokens;  // of query and output
  int64_t key_blocks;
};

struct LoweredPrefill {
  Program program;
  PrefillPlacement placement;
};

// Throws std::invalid_argument for sizes that are no attention's, Incompatible where head_dim is
// not 64, or keys are not in whole blocks of the cache.
LoweredPrefill lower_causal_prefill(const CausalPrefillSizes& sizes, const Machine& machine);

}  // namespace fasttps::npu
