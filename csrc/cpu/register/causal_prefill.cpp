#include "../../ops/causal_prefill.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

#include "../dispatch.h"
#include "attention_rows.h"

namespace fasttps::cpu {
namespace {

// Row blocks are taken longest first by whichever thread is free, so that the long rows at the end
// of the diagonal do not wait for one thread (STEEL, paper 002, balances them by placement).
AttentionResult causal_prefill(const AttentionArgs& args, bool with_lse) {
  const AttentionCall call(args, with_lse);
  if (call.empty()) return call.result();
  std::vector<RowBlock> blocks = call.row_blocks();
  std::stable_sort(blocks.begin(), blocks.end(), [](const RowBlock& a, const RowBlock& b) {
    return a.end - a.begin > b.end - b.begin;
  });
  const int64_t workers = std::min<int64_t>(at::get_num_threads(), std::ssize(blocks));
  const int64_t floats = call.state_floats(kMaxQueryRows) + call.scratch_floats();
  const auto memory =
      std::make_unique_for_overwrite<float[]>(static_cast<size_t>(floats * workers));
  std::atomic<size_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t first, int64_t) {
    float* state_memory = memory.get() + first * floats;
    float* scratch = state_memory + call.state_floats(kMaxQueryRows);
    for (size_t i = next.fetch_add(1); i < blocks.size(); i = next.fetch_add(1)) {
      const RowState state = call.start_state(state_memory, blocks[i].rows);
      call.attend(blocks[i], blocks[i].begin, blocks[i].end, kernels().causal_prefill, state,
                  scratch);
      call.finish(blocks[i], {state});
    }
  });
  return call.result();
}

using Cpu = AttentionEntry<kCausalPrefill, causal_prefill>;

TORCH_LIBRARY_IMPL(fasttps, CPU, m) {
  m.impl("causal_prefill", Cpu::out);
  m.impl("causal_prefill.lse", Cpu::lse);
}

}  // namespace
}  // namespace fasttps::cpu
