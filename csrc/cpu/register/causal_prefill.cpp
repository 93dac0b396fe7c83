#include "../../ops/causal_prefill.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>

#include "../bf16_product.h"
#include "../dispatch.h"
#include "attention_rows.h"

namespace fasttps::cpu {
namespace {

// Row blocks are taken by whichever thread is free (STEEL, paper 002, balances them by placement),
// from the last one back: the keys of a head stay in cache, and the shortest rows come last.
AttentionResult causal_prefill(const AttentionArgs& args, bool with_lse) {
  const AttentionCall call(args, with_lse);
  if (call.empty()) return call.result();
  const std::vector<RowBlock> blocks = call.row_blocks();
  const bool as_bf16 = call.is_bf16() && bf16_product() == Bf16Product::kDpbf16;
  const auto kernel = as_bf16 ? kernels().causal_prefill_bf16 : kernels().causal_prefill;
  const int64_t workers = std::min<int64_t>(at::get_num_threads(), std::ssize(blocks));
  const int64_t state_floats = call.state_floats();
  const int64_t floats = state_floats + call.scratch_floats(prefill_scratch_floats(
                                            call.padded_dim(), call.block_rows()));
  const auto memory =
      std::make_unique_for_overwrite<float[]>(static_cast<size_t>(floats * workers));
  std::atomic<int64_t> left{std::ssize(blocks)};
  at::parallel_for(0, workers, 1, [&](int64_t first, int64_t) {
    float* state_memory = memory.get() + first * floats;
    float* scratch = state_memory + state_floats;
    for (int64_t i = left.fetch_sub(1) - 1; i >= 0; i = left.fetch_sub(1) - 1) {
      const RowState state = call.start_state(state_memory, blocks[i].rows);
      call.attend(blocks[i], blocks[i].begin, blocks[i].end, kernel, state, scratch);
      call.finish(blocks[i], &state, 1);
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
