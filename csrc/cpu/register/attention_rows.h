#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "../../ops/attention.h"
#include "../kernel_table.h"
#include "cache_writer.h"

namespace fasttps::cpu {

// Up to kMaxQueryRows query rows of one (sequence, KV head). Row r of the (sequence, KV head) is
// token r / group, query head kv_head * group + r % group, so rows of one token lie together.
struct RowBlock {
  int64_t batch, kv_head;
  int64_t first_row, rows;
  int64_t begin, end;  // positions that some row may see
};

// The running softmax of some rows: max, sum, attended, out, laid behind each other.
struct RowState {
  float* max;
  float* sum;
  float* out;         // [rows, padded_dim]
  uint8_t* attended;  // [rows]
};

// One attention call, checked, with new rows written: what both schedules work from.
class AttentionCall {
 public:
  // Checks everything, then writes the new rows into the caches.
  AttentionCall(const AttentionArgs& args, bool with_lse);

  AttentionResult result() const { return result_; }
  bool empty() const { return std::get<0>(result_).numel() == 0; }

  // Rows cut into blocks, in the order of memory.
  std::vector<RowBlock> row_blocks() const;

  int64_t padded_dim() const { return padded_dim_; }
  const AttentionShape& shape() const { return shape_; }

  // Rows of the largest block.
  int64_t block_rows() const { return std::min(kMaxQueryRows, shape_.new_tokens * group_); }
  // f32 elements that `attend` needs to work in: the query's rows, and those of the kernel.
  int64_t scratch_floats(int64_t kernel_scratch_floats) const {
    return block_rows() * padded_dim_ + kernel_scratch_floats;
  }
  // f32 elements of the state of a block's rows, and the state laid over them, at its start.
  int64_t state_floats() const { return block_rows() * (padded_dim_ + 3); }
  RowState start_state(float* memory, int64_t rows) const;

  // Whether query and weights may be rounded to bf16: out is. With lse, out is f32 and exact to it,
  // so that splits merge to one pass.
  bool is_bf16() const { return std::get<0>(result_).scalar_type() == at::kBFloat16; }

  // Adds positions [begin, end) to the state, by `kernel` (a row of the table, by cache type).
  void attend(const RowBlock& block, int64_t begin, int64_t end,
              void (*const* kernel)(const AttentionTask&), const RowState& state,
              float* scratch) const;

  // Merges the states of one block's parts (paper 004), adds the sink, writes out and lse.
  void finish(const RowBlock& block, const RowState* parts, size_t part_count) const;

 private:
  void load_query(const RowBlock& block, float* query) const;
  int64_t token_of(int64_t row) const { return row / group_; }
  int64_t head_of(const RowBlock& block, int64_t row) const {
    return block.kv_head * group_ + row % group_;
  }
  int64_t first_position(int64_t batch, int64_t token) const;
  int64_t last_position(int64_t batch, int64_t token) const;

  const AttentionArgs& args_;
  const AttentionShape shape_;
  const AttentionPositions positions_;
  const AttentionResult result_;
  const KernelTable& kernels_;
  RopeTable rope_;
  std::vector<float> sinks_log2_;  // empty: none
  int64_t group_;
  int64_t padded_dim_;
  float query_factor_;
  float softcap_log2_;
};

}  // namespace fasttps::cpu
