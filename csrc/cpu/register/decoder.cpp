#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../panel_split.h"
#include "decoder_plan.h"

namespace fasttps::cpu {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.4426950408889634;

struct Best {
  float value;
  int64_t index;
};

// What the team shares beside the step itself.
struct Shared {
  AttentionPlan plan;
  int64_t padded_dim, rows;  // query rows of a segment
  int64_t state_floats;      // of a segment: max, sum [rows], out [rows, padded_dim], attended
  std::unique_ptr<float[]> states, q, k, v, gated;
  std::vector<Best> best;  // [threads, tokens]
};

std::unique_ptr<float[]> floats(int64_t count) {
  return std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count));
}

// What one thread works in. Norms and activations are made by every thread for itself: they cost
// less than a barrier.
struct Workspace {
  std::unique_ptr<float[]> rows;       // [tokens, widest row]
  std::unique_ptr<float[]> norm;       // [hidden_size]
  std::unique_ptr<char[]> activation;  // [tokens] prepared rows
  std::unique_ptr<float[]> attention;  // query rows, then the kernel's scratch
};

class Worker {
 public:
  Worker(const DecoderStep& step, const KernelTable& kernels, Shared& shared,
         const Workspace& space, const TeamMember& member)
      : step_(step), kernels_(kernels), shared_(shared), space_(space), member_(member) {}

  void run() {
    embed();
    for (const DecoderLayer& layer : step_.layers) {
      norm(layer.input_norm);
      project(layer);
      member_.wait();
      attend(layer);
      member_.wait();
      merge_heads();
      linear(layer.o, step_.x, step_.hidden_size, /*accumulate=*/true);
      member_.wait();
      norm(layer.post_norm);
      gate_up(layer.gate_up);
      member_.wait();
      use_rows(shared_.gated.get(), step_.intermediate_size);
      linear(layer.down, step_.x, step_.hidden_size, /*accumulate=*/true);
      member_.wait();
    }
    finish();
  }

 private:
  void embed() {
    if (step_.ids == nullptr) return;
    const PackedMatrix& table = step_.embedding;
    for (int64_t i = member_.begin(step_.tokens()); i < member_.end(step_.tokens()); ++i) {
      kernels_.unpack_row[table.format](table.packed, table.cols, table.group_size, step_.ids[i],
                                        step_.x + i * step_.hidden_size);
    }
    member_.wait();
  }

  // rows_ = norm(x), for all tokens.
  void norm(const NormWeight& weight) {
    kernels_.load_row[weight.type](weight.weight, space_.norm.get(), step_.hidden_size);
    for (int64_t i = 0; i < step_.tokens(); ++i) {
      kernels_.rms_norm_row(step_.x + i * step_.hidden_size, space_.norm.get(), step_.norm_eps,
                            step_.hidden_size, space_.rows.get() + i * step_.hidden_size);
    }
    use_rows(space_.rows.get(), step_.hidden_size);
  }

  // The f32 rows [tokens, cols] that the next products take.
  void use_rows(const float* rows, int64_t cols) {
    rows_ = rows;
    cols_ = cols;
    prepared_ = false;
  }

  // The rows as `matrix` wants them.
  void prepare(const PackedMatrix& matrix) {
    const ActivationKind kind = matrix.kernels->kind;
    if (prepared_ && kind == kind_ && matrix.cols_padded == cols_padded_) return;
    const int64_t bytes = activation_row_bytes(kind, matrix.cols_padded);
    for (int64_t i = 0; i < step_.tokens(); ++i) {
      kernels_.prepare[kind][kF32](rows_ + i * cols_, cols_, matrix.cols_padded,
                                   space_.activation.get() + i * bytes);
    }
    prepared_ = true;
    kind_ = kind;
    cols_padded_ = matrix.cols_padded;
  }

  // What a LinearTask and a GateUpTask have in common.
  template <class Task>
  Task task(const PackedMatrix& matrix, float* out, int64_t out_stride) {
    prepare(matrix);
    Task task{};
    task.activation = space_.activation.get();
    task.activation_bytes = activation_row_bytes(matrix.kernels->kind, matrix.cols_padded);
    task.tokens = step_.tokens();
    task.cols = matrix.cols_padded;
    task.packed = matrix.packed;
    task.group_size = matrix.group_size;
    task.out = out;
    task.out_type = kF32;
    task.out_stride = out_stride;
    task.rows = matrix.rows;
    // The split of the ops that pack: a thread reads the pages that it touched first.
    const PanelRange mine = panel_range(matrix.panels, member_.index, member_.size);
    task.panel_begin = mine.begin;
    task.panel_end = mine.end;
    return task;
  }

  void linear(const PackedMatrix& matrix, float* out, int64_t out_stride, bool accumulate) {
    auto t = task<LinearTask>(matrix, out, out_stride);
    t.bias = matrix.bias;
    t.accumulate = accumulate;
    if (t.panel_begin < t.panel_end) matrix.kernels->linear(t);
  }

  // q, k and v, split as one stream of bytes.
  void project(const DecoderLayer& layer) {
    const PackedMatrix* const matrices[] = {&layer.q, &layer.k, &layer.v};
    float* const outs[] = {shared_.q.get(), shared_.k.get(), shared_.v.get()};
    int64_t total = 0, offset = 0;
    for (const PackedMatrix* m : matrices) total += m->panels * m->panel_bytes;
    for (int i = 0; i < 3; ++i) {
      const PackedMatrix& m = *matrices[i];
      // Panels whose first byte is before `byte`.
      const auto panels_before = [&](int64_t byte) {
        return std::clamp<int64_t>((byte - offset + m.panel_bytes - 1) / m.panel_bytes, 0,
                                   m.panels);
      };
      auto t = task<LinearTask>(m, outs[i], m.rows);
      t.bias = m.bias;
      t.panel_begin = panels_before(member_.begin(total));
      t.panel_end = panels_before(member_.end(total));
      if (t.panel_begin < t.panel_end) m.kernels->linear(t);
      offset += m.panels * m.panel_bytes;
    }
  }

  void gate_up(const PackedMatrix& matrix) {
    auto t = task<GateUpTask>(matrix, shared_.gated.get(), step_.intermediate_size);
    t.gate_bias = matrix.bias;
    t.up_bias = matrix.up_bias;
    t.function = step_.activation;
    if (t.panel_begin < t.panel_end) matrix.kernels->gate_up(t);
  }

  void attend(const DecoderLayer& layer) {
    const AttentionPlan& plan = shared_.plan;
    const auto parts = static_cast<int64_t>(plan.part_begin.size()) - 1;
    const size_t first = plan.part_begin[member_.begin(parts)];
    const size_t last = plan.part_begin[member_.end(parts)];
    for (size_t i = first; i < last; ++i) {
      if (plan.segments[i].appends) append(layer, plan.segments[i]);
      attend(layer, plan.segments[i], shared_.states.get() + i * shared_.state_floats);
    }
  }

  RopeRow rope(const float* x, int64_t batch, int64_t token, float factor, float* out) const {
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

  void append(const DecoderLayer& layer, const Segment& s) {
    float* row = space_.attention.get();
    for (int64_t token = 0; token < step_.new_tokens; ++token) {
      const int64_t from =
          ((s.batch * step_.new_tokens + token) * step_.num_kv_heads + s.kv_head) * step_.head_dim;
      const int64_t slot = step_.seq_lens[s.batch] + token;
      kernels_.rope_row[kF32](rope(shared_.k.get() + from, s.batch, token, 1.0f, row));
      store(layer.k_cache, s, slot, row);
      store(layer.v_cache, s, slot, shared_.v.get() + from);
    }
  }

  void store(const CacheView& cache, const Segment& s, int64_t slot, const float* row) {
    const int64_t at =
        s.batch * cache.batch_stride + s.kv_head * cache.head_stride + slot * cache.slot_stride;
    if (step_.cache_type == kInt8) {
      kernels_.quantize_row(row, static_cast<int8_t*>(cache.data) + at,
                            scale_of(cache, s) + slot * cache.scale_slot_stride, step_.head_dim);
    } else {
      kernels_.store_row[step_.cache_type](row, 1.0f, address(cache, at), step_.head_dim);
    }
  }

  char* address(const CacheView& cache, int64_t element) const {
    constexpr int64_t kBytes[] = {4, 2, 2, 1};  // by ElementType
    return static_cast<char*>(cache.data) + element * kBytes[step_.cache_type];
  }
  static float* scale_of(const CacheView& cache, const Segment& s) {
    if (cache.scale == nullptr) return nullptr;
    return cache.scale + s.batch * cache.scale_batch_stride + s.kv_head * cache.scale_head_stride;
  }

  int64_t group() const { return step_.num_heads / step_.num_kv_heads; }
  // Row r of a segment is token r / group, head kv_head * group + r % group.
  int64_t query_offset(const Segment& s, int64_t r) const {
    const int64_t token = s.batch * step_.new_tokens + r / group();
    return (token * step_.num_heads + s.kv_head * group() + r % group()) * step_.head_dim;
  }

  void attend(const DecoderLayer& layer, const Segment& s, float* state) {
    const int64_t rows = shared_.rows, padded = shared_.padded_dim;
    float* query = space_.attention.get();
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
    task.scratch = query + kMaxQueryRows * padded;
    kernels_.rope_attention_decode[step_.cache_type](task);
  }

  // rows_ = the heads' outputs [tokens, num_heads * head_dim], the segments' states merged by
  // (m, l, O) (paper 004).
  void merge_heads() {
    const std::vector<Segment>& segments = shared_.plan.segments;
    for (size_t i = 0; i < segments.size();) {
      size_t end = i + 1;
      while (!segments[end - 1].appends) ++end;  // the last segment of a cache appends
      for (int64_t r = 0; r < shared_.rows; ++r) merge_row(i, end, r);
      i = end;
    }
    use_rows(space_.rows.get(), step_.num_heads * step_.head_dim);
  }

  void merge_row(size_t begin, size_t end, int64_t r) {
    const int64_t rows = shared_.rows;
    float* out = space_.rows.get() + query_offset(shared_.plan.segments[begin], r);
    const auto state = [&](size_t i) { return shared_.states.get() + i * shared_.state_floats; };
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

  void finish() {
    if (step_.final_norm != nullptr) {
      norm(*step_.final_norm);
    } else {
      use_rows(step_.x, step_.hidden_size);
    }
    if (step_.lm_head.kernels == nullptr) {
      if (step_.final_norm == nullptr) return;
      member_.wait();  // every thread has read x
      const int64_t begin = member_.begin(step_.tokens()), end = member_.end(step_.tokens());
      std::memcpy(step_.x + begin * step_.hidden_size, rows_ + begin * step_.hidden_size,
                  static_cast<size_t>((end - begin) * step_.hidden_size) * sizeof(float));
      return;
    }
    const PackedMatrix& head = step_.lm_head;
    linear(head, step_.logits, head.rows, /*accumulate=*/false);
    if (step_.argmax == nullptr) return;
    const PanelRange mine = panel_range(head.panels, member_.index, member_.size);
    const int64_t begin = std::min(head.rows, mine.begin * kPanelRows);
    const int64_t end = std::min(head.rows, mine.end * kPanelRows);
    Best* best = shared_.best.data() + member_.index * step_.tokens();
    for (int64_t i = 0; i < step_.tokens(); ++i) {
      const float* logits = step_.logits + i * head.rows;
      best[i] = {kMinusInf, -1};
      if (begin < end) {
        const int64_t at = begin + kernels_.argmax_f32(logits + begin, end - begin);
        best[i] = {logits[at], at};
      }
    }
    member_.wait();
    for (int64_t i = member_.begin(step_.tokens()); i < member_.end(step_.tokens()); ++i) {
      Best first = shared_.best[i];
      for (int64_t t = 1; t < member_.size; ++t) {
        const Best& other = shared_.best[t * step_.tokens() + i];
        if (other.index < 0) continue;
        const bool is_better = first.index < 0 || other.value > first.value ||
                               (std::isnan(other.value) && !std::isnan(first.value));
        if (is_better) first = other;
      }
      step_.argmax[i] = first.index;
    }
  }

  const DecoderStep& step_;
  const KernelTable& kernels_;
  Shared& shared_;
  const Workspace& space_;
  const TeamMember& member_;

  const float* rows_ = nullptr;
  int64_t cols_ = 0;
  bool prepared_ = false;
  ActivationKind kind_ = kActF32;
  int64_t cols_padded_ = 0;
  std::vector<const float*> part_rows_;
  std::vector<float> part_weights_;
};

Workspace make_workspace(const DecoderStep& step, int64_t padded_dim) {
  const int64_t widest = std::max(step.hidden_size, step.num_heads * step.head_dim);
  int64_t bytes = 0;
  const auto widen = [&](const PackedMatrix& m) {
    if (m.kernels != nullptr) {
      bytes = std::max(bytes, activation_row_bytes(m.kernels->kind, m.cols_padded));
    }
  };
  for (const DecoderLayer& l : step.layers) {
    for (const PackedMatrix* m : {&l.q, &l.k, &l.v, &l.o, &l.gate_up, &l.down}) widen(*m);
  }
  widen(step.lm_head);
  Workspace space;
  space.rows = floats(step.tokens() * widest);
  space.norm = floats(step.hidden_size);
  space.activation =
      std::make_unique_for_overwrite<char[]>(static_cast<size_t>(step.tokens() * bytes));
  space.attention = floats(kMaxQueryRows * padded_dim + attention_scratch_floats(padded_dim));
  return space;
}

}  // namespace

void run_decoder_step(const DecoderStep& step, const KernelTable& kernels, int64_t threads) {
  if (step.tokens() == 0) return;
  Shared shared;
  shared.plan = plan_attention(step, threads);
  shared.padded_dim = (step.head_dim + 15) / 16 * 16;
  shared.rows = step.new_tokens * (step.num_heads / step.num_kv_heads);
  shared.state_floats = shared.rows * (shared.padded_dim + 3);
  shared.states = floats(shared.state_floats * static_cast<int64_t>(shared.plan.segments.size()));
  shared.q = floats(step.tokens() * step.num_heads * step.head_dim);
  shared.k = floats(step.tokens() * step.num_kv_heads * step.head_dim);
  shared.v = floats(step.tokens() * step.num_kv_heads * step.head_dim);
  shared.gated = floats(step.tokens() * step.intermediate_size);
  if (step.argmax != nullptr) shared.best.resize(static_cast<size_t>(threads * step.tokens()));
  std::vector<Workspace> spaces;
  for (int64_t t = 0; t < threads; ++t) spaces.push_back(make_workspace(step, shared.padded_dim));
  run_team(threads, [&](const TeamMember& member) {
    Worker(step, kernels, shared, spaces[static_cast<size_t>(member.index)], member).run();
  });
}

}  // namespace fasttps::cpu
