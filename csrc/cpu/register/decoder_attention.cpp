#include "decoder_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fasttps::cpu {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.4426950408889634;

std::unique_ptr<float[]> floats(int64_t count) {
  return std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count));
}

// The scales of one head of an int8 cache, else null.
float* scale_of(const CacheView& cache, const Segment& s) {
  if (cache.scale == nullptr) return nullptr;
  return cache.scale + s.batch * cache.scale_batch_stride + s.kv_head * cache.scale_head_stride;
}

}  // namespace

DecoderAttention::DecoderAttention(const DecoderStep& step, int64_t threads)
    : plan(plan_attention(step, threads)),
      padded_dim((step.head_dim + 15) / 16 * 16),
      rows(step.new_tokens * (step.num_heads / step.num_kv_heads)),
      state_floats(rows * (padded_dim + 3)),
      q(floats(step.tokens() * step.num_heads * step.head_dim)),
      k(floats(step.tokens() * step.num_kv_heads * step.head_dim)),
      v(floats(step.tokens() * step.num_kv_heads * step.head_dim)),
      states(floats(state_floats * static_cast<int64_t>(plan.segments.size()))) {
  for (int64_t t = 0; t < threads; ++t) {
    scratch.push_back(floats(kMaxQueryRows * padded_dim + attention_scratch_floats(padded_dim)));
  }
}

AttentionWorker::AttentionWorker(const DecoderStep& step, const KernelTable& kernels,
                                 DecoderAttention& shared, const TeamMember& member)
    : step_(step),
      kernels_(kernels),
      shared_(shared),
      member_(member),
      scratch_(shared.scratch[static_cast<size_t>(member.index)].get()) {}

void AttentionWorker::run(const DecoderLayer& layer) {
  const AttentionPlan& plan = shared_.plan;
  const auto parts = static_cast<int64_t>(plan.part_begin.size()) - 1;
  const size_t first = plan.part_begin[member_.begin(parts)];
  const size_t last = plan.part_begin[member_.end(parts)];
  for (size_t i = first; i < last; ++i) {
    if (plan.segments[i].appends) append(layer, plan.segments[i]);
    attend(layer, plan.segments[i], state(i));
  }
}

void AttentionWorker::merge(float* out) {
  const std::vector<Segment>& segments = shared_.plan.segments;
  for (size_t i = 0; i < segments.size();) {
    size_t end = i + 1;
    while (!segments[end - 1].appends) ++end;  // the last segment of a cache appends
    for (int64_t r = 0; r < shared_.rows; ++r) merge_row(i, end, r, out);
    i = end;
  }
}

RopeRow AttentionWorker::rope(const float* x, int64_t batch, int64_t token, float factor,
                              float* out) const {
  const int64_t row = batch * step_.rope_batch_stride + token * step_.rotary_dim;
  return {x,
          step_.cos + row,
          step_.sin + row,
          step_.rotary_dim,
          step_.head_dim,
          step_.interleaved,
          factor,
          out};
}

void AttentionWorker::append(const DecoderLayer& layer, const Segment& s) {
  float* row = scratch_;
  for (int64_t token = 0; token < step_.new_tokens; ++token) {
    const int64_t from =
        ((s.batch * step_.new_tokens + token) * step_.num_kv_heads + s.kv_head) * step_.head_dim;
    const int64_t slot = step_.seq_lens[s.batch] + token;
    kernels_.rope_row[kF32](rope(shared_.k.get() + from, s.batch, token, 1.0f, row));
    store(layer.k_cache, s, slot, row);
    store(layer.v_cache, s, slot, shared_.v.get() + from);
  }
}

void AttentionWorker::store(const CacheView& cache, const Segment& s, int64_t slot,
                            const float* row) {
  const int64_t at =
      s.batch * cache.batch_stride + s.kv_head * cache.head_stride + slot * cache.slot_stride;
  if (step_.cache_type == kInt8) {
    kernels_.quantize_row(row, static_cast<int8_t*>(cache.data) + at,
                          scale_of(cache, s) + slot * cache.scale_slot_stride, step_.head_dim);
  } else {
    kernels_.store_row[step_.cache_type](row, 1.0f, address(cache, at), step_.head_dim);
  }
}

char* AttentionWorker::address(const CacheView& cache, int64_t element) const {
  constexpr int64_t kBytes[] = {4, 2, 2, 1};  // by ElementType
  return static_cast<char*>(cache.data) + element * kBytes[step_.cache_type];
}

// Row r of a segment is token r / group, head kv_head * group + r % group.
int64_t AttentionWorker::query_offset(const Segment& s, int64_t r) const {
  const int64_t token = s.batch * step_.new_tokens + r / group();
  return (token * step_.num_heads + s.kv_head * group() + r % group()) * step_.head_dim;
}

void AttentionWorker::attend(const DecoderLayer& layer, const Segment& s, float* state) {
  const int64_t rows = shared_.rows, padded = shared_.padded_dim;
  float* query = scratch_;
  const auto factor = static_cast<float>(step_.scale * kLog2E);
  int64_t first[kMaxQueryRows], last[kMaxQueryRows];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = r / group();
    float* row = query + r * padded;
    kernels_.rope_row[kF32](
        rope(shared_.q.get() + query_offset(s, r), s.batch, token, factor, row));
    std::fill(row + step_.head_dim, row + padded, 0.0f);
    first[r] = first_position(step_, s.batch, token);
    last[r] = step_.seq_lens[s.batch] + token;
  }
  AttentionTask task{};
  task.max = state;
  task.sum = state + rows;
  task.out = state + 2 * rows;
  task.attended = reinterpret_cast<uint8_t*>(task.out + rows * padded);
  std::fill_n(task.max, rows, kMinusInf);
  std::fill_n(task.sum, rows, 0.0f);
  std::fill_n(task.out, rows * padded, 0.0f);
  std::fill_n(task.attended, rows, uint8_t{0});
  if (s.begin >= s.end) return;
  task.query = query;
  task.rows = rows;
  task.head_dim = step_.head_dim;
  task.padded_dim = padded;
  const CacheView &k = layer.k_cache, &v = layer.v_cache;
  task.k = address(k, s.batch * k.batch_stride + s.kv_head * k.head_stride);
  task.v = address(v, s.batch * v.batch_stride + s.kv_head * v.head_stride);
  task.k_stride = k.slot_stride;
  task.v_stride = v.slot_stride;
  task.k_scale = scale_of(k, s);
  task.v_scale = scale_of(v, s);
  task.k_scale_stride = k.scale_slot_stride;
  task.v_scale_stride = v.scale_slot_stride;
  task.begin = s.begin;
  task.end = s.end;
  task.first = first;
  task.last = last;
  // int8 keys and values are rounded far more than a 16-bit query.
  task.bf16_factor = step_.cache_type == kInt8 ? factor : 0.0f;
  task.scratch = query + kMaxQueryRows * padded;
  kernels_.rope_attention_decode[step_.cache_type](task);
}

void AttentionWorker::merge_row(size_t begin, size_t end, int64_t r, float* heads) {
  const int64_t rows = shared_.rows;
  float* out = heads + query_offset(shared_.plan.segments[begin], r);
  float max = kMinusInf;
  for (size_t i = begin; i < end; ++i) max = std::max(max, state(i)[r]);
  const float shift = max == kMinusInf ? 0.0f : max;
  float sum = 0.0f;
  bool attended = false;
  for (size_t i = begin; i < end; ++i) {
    sum += std::exp2(state(i)[r] - shift) * state(i)[rows + r];
    attended |=
        reinterpret_cast<const uint8_t*>(state(i) + 2 * rows + rows * shared_.padded_dim)[r] != 0;
  }
  // A row that may see nothing gives 0; one whose scores are all -inf gives 0 / 0.
  const float divisor = attended ? sum : 1.0f;
  const size_t parts = end - begin;
  part_rows_.resize(parts);
  part_weights_.resize(parts);
  for (size_t p = 0; p < parts; ++p) {
    part_rows_[p] = state(begin + p) + 2 * rows + r * shared_.padded_dim;
    part_weights_[p] = std::exp2(state(begin + p)[r] - shift) / divisor;
  }
  kernels_.merge_attention(part_rows_.data(), part_weights_.data(), static_cast<int64_t>(parts),
                           out, step_.head_dim);
}

}  // namespace fasttps::cpu
