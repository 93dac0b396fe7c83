#include "decoder_plan.h"

#include <algorithm>

namespace fasttps::cpu {

int64_t first_position(const DecoderStep& step, int64_t window, int64_t batch, int64_t token) {
  return std::max(step.kv_start[batch], step.seq_lens[batch] + token - window + 1);
}

AttentionPlan plan_attention(const DecoderStep& step, int64_t window, int64_t parts) {
  constexpr int64_t kSegmentCost = 16;  // of starting one, in positions
  int64_t total = 0;
  for (int64_t b = 0; b < step.batch; ++b) {
    total += step.num_kv_heads * (kSegmentCost + step.seq_lens[b] + step.new_tokens -
                                  first_position(step, window, b, 0));
  }
  const int64_t quota = (total + parts - 1) / parts;
  AttentionPlan plan{{}, {0}};
  int64_t left = quota;
  const auto next_part = [&] {
    plan.part_begin.push_back(plan.segments.size());
    left = quota;
  };
  for (int64_t b = 0; b < step.batch; ++b) {
    const int64_t end = step.seq_lens[b] + step.new_tokens;
    for (int64_t h = 0; h < step.num_kv_heads; ++h) {
      int64_t begin = first_position(step, window, b, 0);
      while (true) {
        const bool is_last_part = static_cast<int64_t>(plan.part_begin.size()) == parts;
        const int64_t cut = begin + (left - kSegmentCost) / kKeyBlock * kKeyBlock;
        // The new rows are written by the thread that attends to all of them.
        if (is_last_part || left >= end - begin + kSegmentCost || cut > step.seq_lens[b]) {
          plan.segments.push_back({b, h, begin, end, true});
          left -= end - begin + kSegmentCost;
          break;
        }
        if (cut > begin) plan.segments.push_back({b, h, begin, cut, false});
        begin = std::max(begin, cut);
        next_part();
      }
    }
  }
  while (static_cast<int64_t>(plan.part_begin.size()) <= parts) next_part();
  return plan;
}

}  // namespace fasttps::cpu
