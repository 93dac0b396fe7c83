#pragma once
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

  // f32 elements that `attend` needs to work in.
  int64_t scratch_floats() const;
  // f32 elements of the state of `rows` rows, and the state laid over them, at its start.
  int64_t state_floats(int64_t rows) const { return rows * (padded_dim_ + 3); }
  RowState start_state(float* memory, int64_t rows) const;

  // Adds positions [begin, end) to the state, by `kernel` (a row of the table, by cache type).
  void attend(const RowBlock& block, int64_t begin, int64_t end,
              void (*const* kernel)(const AttentionTask&), const RowState& state,
              float* scratch) const;

  // Merges the states of one block's parts (paper 004), adds the sink, writes out and lse.
  void finish(const RowBlock& block, const std::vector<RowState>& parts) const;

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
