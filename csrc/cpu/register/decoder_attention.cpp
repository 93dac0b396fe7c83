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
    : padded_dim((step.head_dim + 15) / 16 * 16),
      rows(step.new_tokens * (step.num_heads / step.num_kv_heads)),
      state_floats(rows * (padded_dim + 3)),
      q(floats(step.tokens() * step.num_heads * step.head_dim)),
      k(floats(step.tokens() * step.num_kv_heads * step.head_dim)),
      v(floats(step.tokens() * step.num_kv_heads * step.head_dim)) {
  size_t segments = 0;
  bool norms_heads = false, norms_all = false;
  for (const DecoderLayer& layer : step.layers) {
    const auto is_planned = [&](const auto& plan) { return plan.first == layer.window; };
    if (std::none_of(plans.begin(), plans.end(), is_planned)) {
      plans.emplace_back(layer.window, plan_attention(step, layer.window, threads));
      segments = std::max(segments, plans.back().second.segments.size());
    }
    for (const HeadNorm* norm : {&layer.q_norm, &layer.k_norm}) {
      norms_heads |= norm->weight.weight != nullptr;
      norms_all |= norm->over_all;
    }
  }
  states = floats(state_floats * static_cast<int64_t>(segments));
  const int64_t heads = (step.num_heads + step.num_kv_heads) * step.head_dim;
  for (int64_t t = 0; t < threads; ++t) {
    scratch.push_back(floats(kMaxQueryRows * padded_dim + attention_scratch_floats(padded_dim)));
    if (norms_heads) {
      norms.push_back(floats(heads + step.head_dim + (norms_all ? step.tokens() * heads : 0)));
    }
  }
}

const AttentionPlan& DecoderAttention::plan(const DecoderLayer& layer) const {
  size_t i = 0;
  while (plans[i].first != layer.window) ++i;
  return plans[i].second;
}

void load_norm(const DecoderStep& step, const KernelTable& kernels, const NormWeight& norm,
               int64_t count, float* out) {
  kernels.load_row[norm.type](norm.weight, out, count);
  if (step.norm_offset == 0.0f) return;
  for (int64_t i = 0; i < count; ++i) out[i] += step.norm_offset;
}

AttentionWorker::AttentionWorker(const DecoderStep& step, const KernelTable& kernels,
                                 DecoderAttention& shared, const TeamMember& member)
    : step_(step),
      kernels_(kernels),
      shared_(shared),
      member_(member),
      scratch_(shared.scratch[static_cast<size_t>(member.index)].get()) {}

void AttentionWorker::run(const DecoderLayer& layer) {
  float* room = nullptr;
  if (!shared_.norms.empty()) {
    head_ = shared_.norms[static_cast<size_t>(member_.index)].get();
    room = head_ + step_.head_dim;
  }
  q_ = normalize(layer.q_norm, shared_.q.get(), step_.num_heads, room);
  k_ = normalize(layer.k_norm, shared_.k.get(), step_.num_kv_heads, room);
  const AttentionPlan& plan = shared_.plan(layer);
  const auto parts = static_cast<int64_t>(plan.part_begin.size()) - 1;
  const size_t first = plan.part_begin[member_.begin(parts)];
  const size_t last = plan.part_begin[member_.end(parts)];
  for (size_t i = first; i < last; ++i) {
    if (plan.segments[i].appends) append(layer, plan.segments[i]);
    attend(layer, plan.segments[i], state(i));
  }
}

void AttentionWorker::merge(const DecoderLayer& layer, float* out) {
  const std::vector<Segment>& segments = shared_.plan(layer).segments;
  for (size_t i = 0; i < segments.size();) {
    size_t end = i + 1;
    while (!segments[end - 1].appends) ++end;  // the last segment of a cache appends
    for (int64_t r = 0; r < shared_.rows; ++r) merge_row(segments.data(), i, end, r, out);
    i = end;
  }
}

// `room` is moved past what is used of it; there is none where no layer has such norms.
AttentionWorker::Heads AttentionWorker::normalize(const HeadNorm& norm, const float* rows,
                                                  int64_t heads, float*& room) const {
  if (norm.weight.weight == nullptr || room == nullptr) return {rows, heads, nullptr};
  const int64_t count = norm.over_all ? heads * step_.head_dim : step_.head_dim;
  float* weight = room;
  room += heads * step_.head_dim;
  load_norm(step_, kernels_, norm.weight, count, weight);
  if (!norm.over_all) return {rows, heads, weight};
  float* out = room;
  room += step_.tokens() * count;
  for (int64_t i = 0; i < step_.tokens(); ++i) {
    kernels_.rms_norm_row(rows + i * count, weight, step_.norm_eps, count, out + i * count);
  }
  return {out, heads, nullptr};
}

void AttentionWorker::rotate(const DecoderLayer& layer, const Heads& from, int64_t batch,
                             int64_t token, int64_t head, float factor, float* out) const {
  const float* x =
      from.rows + ((batch * step_.new_tokens + token) * from.heads + head) * step_.head_dim;
  if (from.weight != nullptr) {
    kernels_.rms_norm_row(x, from.weight, step_.norm_eps, step_.head_dim, head_);
    x = head_;
  }
  const bool turns = layer.rope_table >= 0;
  const int64_t row = turns ? layer.rope_table * step_.rope_table_stride +
                                  batch * step_.rope_batch_stride + token * step_.rotary_dim
                            : 0;
  kernels_.rope_row[kF32]({x, step_.cos + row, step_.sin + row, turns ? step_.rotary_dim : 0,
                           step_.head_dim, step_.interleaved, factor, out});
}

void AttentionWorker::append(const DecoderLayer& layer, const Segment& s) {
  float* row = scratch_;
  for (int64_t token = 0; token < step_.new_tokens; ++token) {
    const int64_t from =
        ((s.batch * step_.new_tokens + token) * step_.num_kv_heads + s.kv_head) * step_.head_dim;
    const int64_t position = step_.seq_lens[s.batch] + token;
    const int64_t slot = layer.ring > 0 ? position % layer.ring : position;
    rotate(layer, k_, s.batch, token, s.kv_head, 1.0f, row);
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

void AttentionWorker::attend(const DecoderLayer& layer, const Segment& s, float* state) {
  const int64_t rows = shared_.rows, padded = shared_.padded_dim;
  float* query = scratch_;
  const bool capped = step_.softcap > 0.0f;
  const auto factor = static_cast<float>(capped ? double{step_.scale} / step_.softcap
                                                : double{step_.scale} * kLog2E);
  int64_t first[kMaxQueryRows], last[kMaxQueryRows];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = r / group();
    float* row = query + r * padded;
    rotate(layer, q_, s.batch, token, head_of(s, r), factor, row);
    std::fill(row + step_.head_dim, row + padded, 0.0f);
    first[r] = first_position(step_, layer.window, s.batch, token);
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
  task.first = first;
  task.last = last;
  // int8 keys and values are rounded far more than a 16-bit query.
  task.bf16_factor = step_.cache_type == kInt8 ? factor : 0.0f;
  task.softcap_log2 = capped ? static_cast<float>(step_.softcap * kLog2E) : 0.0f;
  task.scratch = query + kMaxQueryRows * padded;
  // A ring is walked in runs of slots that lie behind each other.
  for (int64_t begin = s.begin; begin < s.end; begin = task.end) {
    const int64_t slot = layer.ring > 0 ? begin % layer.ring : begin;
    task.slot_shift = begin - slot;
    task.begin = begin;
    task.end = layer.ring > 0 ? std::min(s.end, begin + layer.ring - slot) : s.end;
    kernels_.rope_attention_decode[step_.cache_type](task);
  }
}

void AttentionWorker::merge_row(const Segment* segments, size_t begin, size_t end, int64_t r,
                                float* heads) {
  const int64_t rows = shared_.rows;
  const Segment& s = segments[begin];
  const int64_t token = s.batch * step_.new_tokens + r / group();
  float* out = heads + (token * step_.num_heads + head_of(s, r)) * step_.head_dim;
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
