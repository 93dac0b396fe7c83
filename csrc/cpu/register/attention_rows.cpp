#include "attention_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../ops/kv_cache_update.h"
#include "../dispatch.h"
#include "../element_type.h"

namespace fasttps::cpu {
namespace {

constexpr int64_t kWholeRange = 2 * kFarthestPosition;
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

}  // namespace

AttentionCall::AttentionCall(const AttentionArgs& args, bool with_lse)
    : args_(args),
      shape_(check_attention(args)),
      positions_(check_attention_positions(args, shape_)),
      result_(empty_attention_result(args, with_lse)),
      kernels_(kernels()),
      rope_(rope_table(args.cos, args.sin, args.interleaved)),
      group_(shape_.num_heads / shape_.num_kv_heads),
      padded_dim_((shape_.head_dim + 15) / 16 * 16) {
  const double scale = args.scale.value_or(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
  const double softcap = args.softcap.value_or(0.0);
  query_factor_ = static_cast<float>(softcap > 0.0 ? scale / softcap : scale * kLog2E);
  softcap_log2_ = static_cast<float>(softcap * kLog2E);
  if (args.sinks) {
    sinks_log2_.resize(static_cast<size_t>(shape_.num_heads));
    for (int64_t h = 0; h < shape_.num_heads; ++h) {
      float sink;
      kernels_.load_row[element_type(*args.sinks)](element(*args.sinks, h * args.sinks->stride(0)),
                                                   &sink, 1);
      sinks_log2_[h] = static_cast<float>(sink * kLog2E);
    }
  }
  if (shape_.appends && args.key->numel() > 0) {
    write_new_rows(*args.key, *args.value, rope_, args.k_cache, args.v_cache, args.k_scale,
                   args.v_scale, positions_.seq_lens, args.ring);
  }
}

int64_t AttentionCall::last_position(int64_t batch, int64_t token) const {
  return std::min(positions_.query_start[batch] + token, positions_.kv_len[batch] - 1);
}

int64_t AttentionCall::first_position(int64_t batch, int64_t token) const {
  int64_t first = positions_.kv_start[batch];
  // A wider window than any two positions lie apart sees all, and must not overflow.
  const int64_t window = std::min(args_.window.value_or(kWholeRange), kWholeRange);
  first = std::max(first, positions_.query_start[batch] + token - window + 1);
  if (args_.ring) first = std::max(first, positions_.kv_len[batch] - shape_.max_seq_len);
  return first;
}

std::vector<RowBlock> AttentionCall::row_blocks() const {
  std::vector<RowBlock> blocks;
  const int64_t rows = shape_.new_tokens * group_;
  for (int64_t b = 0; b < shape_.batch; ++b) {
    for (int64_t h = 0; h < shape_.num_kv_heads; ++h) {
      for (int64_t row = 0; row < rows; row += kMaxQueryRows) {
        RowBlock block{b, h, row, std::min(kMaxQueryRows, rows - row), 0, 0};
        // Limits grow with the token, so the first and the last row bound the block.
        block.begin = first_position(b, token_of(row));
        block.end = std::max(block.begin, last_position(b, token_of(row + block.rows - 1)) + 1);
        blocks.push_back(block);
      }
    }
  }
  return blocks;
}

RowState AttentionCall::start_state(float* memory, int64_t rows) const {
  RowState state{memory, memory + rows, memory + 2 * rows, nullptr};
  state.attended = reinterpret_cast<uint8_t*>(state.out + rows * padded_dim_);
  std::fill_n(state.max, rows, kMinusInf);
  std::fill_n(state.sum, rows, 0.0f);
  std::fill_n(state.out, rows * padded_dim_, 0.0f);
  std::fill_n(state.attended, rows, uint8_t{0});
  return state;
}

void AttentionCall::load_query(const RowBlock& block, float* query) const {
  const at::Tensor& q = args_.query;
  const auto* base = static_cast<const char*>(q.const_data_ptr());
  const int64_t row_bytes = shape_.head_dim * q.element_size();
  const auto query_row = [&, batch_offset = block.batch * q.stride(0), token_stride = q.stride(1),
                          head_stride = q.stride(2), bytes = q.element_size()](int64_t row) {
    return base +
           (batch_offset + token_of(row) * token_stride + head_of(block, row) * head_stride) *
               bytes;
  };
  // Rows of one head lie far apart: all are asked for before the first is waited for.
  for (int64_t r = 0; block.rows > 4 && r < block.rows; ++r) {
    for (int64_t i = 0; i < row_bytes; i += 64) {
      __builtin_prefetch(query_row(block.first_row + r) + i);
    }
  }
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = block.first_row + r, token = token_of(row);
    float* out = query + r * padded_dim_;
    kernels_.rope_row[element_type(q)]({query_row(row), rope_.cos_row(block.batch, token),
                                        rope_.sin_row(block.batch, token), rope_.rotary_dim,
                                        shape_.head_dim, rope_.interleaved, query_factor_, out});
    std::fill(out + shape_.head_dim, out + padded_dim_, 0.0f);
  }
}

void AttentionCall::attend(const RowBlock& block, int64_t begin, int64_t end,
                           void (*const* kernel)(const AttentionTask&), const RowState& state,
                           float* scratch) const {
  if (begin >= end) return;
  const at::Tensor& k = args_.k_cache;
  const at::Tensor& v = args_.v_cache;
  load_query(block, scratch);
  int64_t first[kMaxQueryRows], last[kMaxQueryRows];
  const uint8_t* mask[kMaxQueryRows];
  AttentionTask task{};
  task.query = scratch;
  task.rows = block.rows;
  task.head_dim = shape_.head_dim;
  task.padded_dim = padded_dim_;
  task.k = element(k, block.batch * k.stride(0) + block.kv_head * k.stride(1));
  task.v = element(v, block.batch * v.stride(0) + block.kv_head * v.stride(1));
  task.k_stride = k.stride(2);
  task.v_stride = v.stride(2);
  if (args_.k_scale) {
    const at::Tensor& ks = *args_.k_scale;
    const at::Tensor& vs = *args_.v_scale;
    task.k_scale =
        ks.const_data_ptr<float>() + block.batch * ks.stride(0) + block.kv_head * ks.stride(1);
    task.v_scale =
        vs.const_data_ptr<float>() + block.batch * vs.stride(0) + block.kv_head * vs.stride(1);
    task.k_scale_stride = ks.stride(2);
    task.v_scale_stride = vs.stride(2);
  }
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = block.first_row + r, token = token_of(row);
    first[r] = first_position(block.batch, token);
    last[r] = last_position(block.batch, token);
    if (args_.attn_mask) {
      const at::Tensor& m = *args_.attn_mask;
      const int64_t b = m.size(0) > 1 ? block.batch : 0;
      const int64_t h = m.size(1) > 1 ? head_of(block, row) : 0;
      mask[r] = static_cast<const uint8_t*>(
          element(m, b * m.stride(0) + h * m.stride(1) + token * m.stride(2)));
    }
  }
  task.first = first;
  task.last = last;
  task.mask = args_.attn_mask ? mask : nullptr;
  task.mask_stride = args_.attn_mask ? args_.attn_mask->stride(3) : 0;
  task.softcap_log2 = softcap_log2_;
  task.max = state.max;
  task.sum = state.sum;
  task.out = state.out;
  task.attended = state.attended;
  task.bf16_factor = is_bf16() ? query_factor_ : 0.0f;
  task.scratch = scratch + block.rows * padded_dim_;
  // A ring is walked in runs of slots that lie behind each other.
  while (begin < end) {
    const int64_t slot = args_.ring ? begin % shape_.max_seq_len : begin;
    task.slot_shift = begin - slot;
    task.begin = begin;
    task.end = args_.ring ? std::min(end, begin + shape_.max_seq_len - slot) : end;
    kernel[element_type(k)](task);
    begin = task.end;
  }
}

void AttentionCall::finish(const RowBlock& block, const RowState* parts, size_t part_count) const {
  const auto& [out, lse] = result_;
  const bool split = part_count > 1;
  std::vector<const float*> rows(split ? part_count : 0);
  std::vector<float> weights(split ? part_count : 0);
  std::vector<float> merged(split ? static_cast<size_t>(padded_dim_) : 0);
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = block.first_row + r, token = token_of(row), head = head_of(block, row);
    const float sink = sinks_log2_.empty() ? kMinusInf : sinks_log2_[head];
    bool attended = false;
    float max = sink;
    for (size_t p = 0; p < part_count; ++p) {
      attended |= parts[p].attended[r] != 0;
      max = std::max(max, parts[p].max[r]);
    }
    const float shift = max == kMinusInf ? 0.0f : max;
    float sum = sinks_log2_.empty() ? 0.0f : std::exp2(sink - shift);
    const float* unscaled = parts[0].out + r * padded_dim_;
    float factor;
    if (split) {
      for (size_t p = 0; p < part_count; ++p) {
        weights[p] = std::exp2(parts[p].max[r] - shift);
        sum += weights[p] * parts[p].sum[r];
        rows[p] = parts[p].out + r * padded_dim_;
      }
      kernels_.merge_attention(rows.data(), weights.data(), static_cast<int64_t>(part_count),
                               merged.data(), shape_.head_dim);
      unscaled = merged.data();
      factor = 1.0f / sum;
    } else {
      factor = std::exp2(parts[0].max[r] - shift);
      sum += factor * parts[0].sum[r];
      factor /= sum;
    }
    float lse_value = 0.0f;
    if (lse.defined()) {
      lse_value = static_cast<float>((shift + std::log2(static_cast<double>(sum))) * kLn2);
    }
    if (!attended) {  // the state is still at its start: 0
      factor = 0.0f;
      lse_value = static_cast<float>(sink * kLn2);
    } else if (sum == 0.0f) {  // every score was -inf
      factor = lse_value = kNaN;
    }
    const int64_t at = (block.batch * shape_.new_tokens + token) * shape_.num_heads + head;
    kernels_.store_row[element_type(out)](
        unscaled, factor, mutable_element(out, at * shape_.head_dim), shape_.head_dim);
    if (lse.defined()) {
      lse.mutable_data_ptr<float>()[(block.batch * shape_.num_heads + head) * shape_.new_tokens +
                                    token] = lse_value;
    }
  }
}

}  // namespace fasttps::cpu
