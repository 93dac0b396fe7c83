#include "../../ops/rope_attention_decode.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../dispatch.h"
#include "attention_rows.h"

namespace fasttps::cpu {
namespace {

// Positions of one row block, worked on by one thread.
struct Segment {
  size_t block;
  int64_t begin, end;
};

// Cuts all positions of all blocks, taken as one line, into `parts` equal runs; cuts fall on whole
// key blocks. part_ends[p] is the number of segments of the parts up to p.
struct Split {
  std::vector<Segment> segments;
  std::vector<size_t> part_ends;
};

Split split_evenly(const std::vector<RowBlock>& blocks, int64_t total, int64_t parts) {
  Split split;
  const int64_t run = (total / parts + kKeyBlock) / kKeyBlock * kKeyBlock;
  int64_t left = run;
  for (size_t i = 0; i < blocks.size(); ++i) {
    int64_t begin = blocks[i].begin;
    do {  // a block without positions still gets a segment, whose result is 0
      const int64_t end = begin + std::min(left, blocks[i].end - begin);
      split.segments.push_back({i, begin, end});
      left -= end - begin;
      begin = end;
      if (left == 0) {
        split.part_ends.push_back(split.segments.size());
        left = run;
      }
    } while (begin < blocks[i].end);
  }
  if (split.part_ends.empty() || split.part_ends.back() < split.segments.size()) {
    split.part_ends.push_back(split.segments.size());
  }
  return split;
}

AttentionResult rope_attention_decode(const AttentionArgs& args, bool with_lse) {
  const AttentionCall call(args, with_lse);
  if (call.empty()) return call.result();
  const std::vector<RowBlock> blocks = call.row_blocks();
  int64_t total = 0;
  for (const RowBlock& block : blocks) total += block.end - block.begin;
  const int64_t worth_a_thread = 1 + 16384 / call.padded_dim();  // positions
  const int64_t parts = std::clamp<int64_t>(total / worth_a_thread, 1,
                                            at::in_parallel_region() ? 1 : at::get_num_threads());
  const Split split = split_evenly(blocks, total, parts);

  const int64_t part_count = static_cast<int64_t>(split.part_ends.size());
  const int64_t state_floats = call.state_floats();
  const int64_t scratch_floats =
      call.scratch_floats(decode_scratch_floats(call.padded_dim(), call.block_rows()));
  const auto states = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(state_floats) *
                                                              split.segments.size());
  const auto scratch =
      std::make_unique_for_overwrite<float[]>(static_cast<size_t>(scratch_floats * part_count));
  std::vector<RowState> done(split.segments.size());
  const auto whole = [&](const Segment& s) {
    return s.begin == blocks[s.block].begin && s.end == blocks[s.block].end;
  };
  at::parallel_for(0, part_count, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      for (size_t i = part == 0 ? 0 : split.part_ends[part - 1]; i < split.part_ends[part]; ++i) {
        const Segment& segment = split.segments[i];
        const RowBlock& block = blocks[segment.block];
        done[i] = call.start_state(states.get() + i * state_floats, block.rows);
        call.attend(block, segment.begin, segment.end, kernels().rope_attention_decode, done[i],
                    scratch.get() + part * scratch_floats);
        if (whole(segment)) call.finish(block, &done[i], 1);
      }
    }
  });
  for (size_t i = 0; i < split.segments.size();) {
    const Segment& segment = split.segments[i];
    const size_t first = i;
    while (i < split.segments.size() && split.segments[i].block == segment.block) ++i;
    if (!whole(segment)) call.finish(blocks[segment.block], &done[first], i - first);
  }
  return call.result();
}

using Cpu = AttentionEntry<kRopeAttentionDecode, rope_attention_decode>;

TORCH_LIBRARY_IMPL(fasttps, CPU, m) {
  m.impl("rope_attention_decode", Cpu::out);
  m.impl("rope_attention_decode.lse", Cpu::lse);
}

}  // namespace
}  // namespace fasttps::cpu
