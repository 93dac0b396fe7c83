#pragma once
#include <vector>

#include "decoder.h"

// How the attention of a decoder step is shared out among threads.
namespace fasttps::cpu {

// Positions [begin, end) of one sequence's cache of one KV head, attended by one thread.
struct Segment {
  int64_t batch, kv_head, begin, end;
  bool appends;  // writes the new rows first; they lie at the end of it
};

// All positions of all caches of a layer in `parts` runs of about equal bytes. The segments of one
// (sequence, KV head) follow each other.
struct AttentionPlan {
  std::vector<Segment> segments;
  std::vector<size_t> part_begin;  // segments of part p: part_begin[p] <= i < part_begin[p + 1]
};

AttentionPlan plan_attention(const DecoderStep& step, int64_t window, int64_t parts);

// The first position that new token `token` of a sequence may see.
int64_t first_position(const DecoderStep& step, int64_t window, int64_t batch, int64_t token);

}  // namespace fasttps::cpu
