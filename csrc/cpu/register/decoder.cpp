#include "decoder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "../panel_queue.h"
#include "../spread_rows.h"
#include "decoder_attention.h"

namespace fasttps::cpu {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

struct Best {
  float value;
  int64_t index;
};

// What the team shares beside the step itself.
struct Shared {
  DecoderAttention attention;
  PanelQueue queue;
  std::unique_ptr<float[]> gated;  // [tokens, intermediate_size]
  std::unique_ptr<float[]> added;  // [tokens, hidden_size], what attention or MLP adds; or null
  std::vector<Best> best;          // [threads, tokens]
};

// From one token's activations to the next.
int64_t row_bytes(const PackedMatrix& matrix) {
  return spread_row_bytes(activation_row_bytes(matrix.kernels->kind, matrix.cols_padded));
}

std::unique_ptr<float[]> floats(int64_t count) {
  return std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count));
}

// What one thread works in. Norms and activations are made by every thread for itself: they cost
// less than a barrier.
struct Workspace {
  std::unique_ptr<float[]> rows;       // [tokens, widest row]
  std::unique_ptr<float[]> norm;       // [hidden_size]
  std::unique_ptr<float[]> x;          // [tokens, hidden_size], where the team adds to no x
  std::unique_ptr<float[]> gathered;   // [widest row]
  std::unique_ptr<char[]> activation;  // [tokens] prepared rows
};

class Worker {
 public:
  Worker(const DecoderStep& step, const KernelTable& kernels, Shared& shared,
         const Workspace& space, const TeamMember& member)
      : step_(step),
        kernels_(kernels),
        shared_(shared),
        space_(space),
        member_(member),
        attention_(step, kernels, shared.attention, member),
        x_(step.x) {}

  void run() {
    embed();
    for (const DecoderLayer& layer : step_.layers) {
      norm(layer.input_norm);
      project(layer);
      member_.wait();
      attention_.run(layer);
      member_.wait();
      attention_.merge(layer, space_.rows.get());
      use_rows(space_.rows.get(), step_.num_heads * step_.head_dim);
      add(layer.o, layer.attention_out_norm);
      norm(layer.post_norm);
      gate_up(layer.gate_up);
      member_.wait();
      use_rows(shared_.gated.get(), step_.intermediate_size);
      add(layer.down, layer.mlp_out_norm);
    }
    finish();
  }

 private:
  void embed() {
    if (step_.ids == nullptr) return;
    const PackedMatrix& table = step_.embedding;
    for (int64_t i = member_.begin(step_.tokens()); i < member_.end(step_.tokens()); ++i) {
      float* row = step_.x + i * step_.hidden_size;
      kernels_.unpack_row[table.format](table.packed, table.cols, table.group_size, step_.ids[i],
                                        row);
      if (step_.embedding_scale != 1.0f) {
        kernels_.scale_row(row, step_.hidden_size, step_.embedding_scale, 0.0f);
      }
    }
    member_.wait();
  }

  // rows_ = norm(x), for all tokens; x itself without a weight.
  void norm(const NormWeight& weight) {
    if (weight.weight == nullptr) {
      use_rows(x_, step_.hidden_size);
      return;
    }
    load_norm(step_, kernels_, weight, step_.hidden_size, space_.norm.get());
    for (int64_t i = 0; i < step_.tokens(); ++i) {
      kernels_.rms_norm_row(x_ + i * step_.hidden_size, space_.norm.get(), step_.norm_eps,
                            step_.hidden_size, space_.rows.get() + i * step_.hidden_size);
    }
    use_rows(space_.rows.get(), step_.hidden_size);
  }

  // x += residual_scale * norm(matrix rows). Without a norm and a scale the products add to the x
  // of all; else every thread adds to an x of its own, which costs less than a barrier.
  void add(const PackedMatrix& matrix, const NormWeight& weight) {
    if (shared_.added == nullptr) {
      linear(matrix, step_.x, step_.hidden_size, /*accumulate=*/true);
      member_.wait();
      return;
    }
    linear(matrix, shared_.added.get(), step_.hidden_size, /*accumulate=*/false);
    member_.wait();
    const int64_t size = step_.hidden_size;
    if (weight.weight != nullptr) {
      load_norm(step_, kernels_, weight, size, space_.norm.get());
    }
    for (int64_t i = 0; i < step_.tokens(); ++i) {
      const float* from = shared_.added.get() + i * size;
      if (weight.weight != nullptr) {
        kernels_.rms_norm_row(from, space_.norm.get(), step_.norm_eps, size, space_.rows.get());
        from = space_.rows.get();
      }
      const float* before = x_ + i * size;
      float* x = space_.x.get() + i * size;
      for (int64_t c = 0; c < size; ++c) x[c] = before[c] + step_.residual_scale * from[c];
    }
    x_ = space_.x.get();
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
    if (prepared_ && kind == kind_ && matrix.cols_padded == cols_padded_ &&
        matrix.order == order_) {
      return;
    }
    const int64_t bytes = row_bytes(matrix);
    for (int64_t i = 0; i < step_.tokens(); ++i) {
      const float* row = rows_ + i * cols_;
      if (matrix.order != nullptr) {
        float* gathered = space_.gathered.get();
        for (int64_t c = 0; c < cols_; ++c) gathered[c] = row[matrix.order[c]];
        row = gathered;
      }
      kernels_.prepare[kind][kF32](row, cols_, matrix.cols_padded,
                                   space_.activation.get() + i * bytes);
    }
    prepared_ = true;
    kind_ = kind;
    cols_padded_ = matrix.cols_padded;
    order_ = matrix.order;
  }

  // What a LinearTask and a GateUpTask have in common.
  template <class Task>
  Task task(const PackedMatrix& matrix, float* out, int64_t out_stride) {
    prepare(matrix);
    Task task{};
    task.activation = space_.activation.get();
    task.activation_bytes = row_bytes(matrix);
    task.tokens = step_.tokens();
    task.cols = matrix.cols_padded;
    task.packed = matrix.packed;
    task.group_size = matrix.group_size;
    task.out = out;
    task.out_type = kF32;
    task.out_stride = out_stride;
    task.rows = matrix.rows;
    return task;
  }

  // Calls run(begin, end) for this member's share of `panels`. The split is that of the ops that
  // pack: a thread reads the pages that it touched first.
  template <class Run>
  void share(int64_t panels, int64_t panel_bytes, const Run& run) {
    shared_.queue.share(phase_++, member_, panels, panel_bytes, run);
  }

  // The task's kernel on a range of panels.
  template <class Task>
  static void run_range(Task& t, void (*kernel)(const Task&), int64_t begin, int64_t end) {
    t.panel_begin = begin;
    t.panel_end = end;
    kernel(t);
  }

  void linear(const PackedMatrix& matrix, float* out, int64_t out_stride, bool accumulate) {
    auto t = task<LinearTask>(matrix, out, out_stride);
    t.bias = matrix.bias;
    t.accumulate = accumulate;
    share(matrix.panels, matrix.panel_bytes,
          [&](int64_t begin, int64_t end) { run_range(t, matrix.kernels->linear, begin, end); });
  }

  // q, k and v, shared as one matrix.
  void project(const DecoderLayer& layer) {
    const std::array<const PackedMatrix*, 3> matrices{&layer.q, &layer.k, &layer.v};
    const DecoderAttention& attention = shared_.attention;
    const std::array<float*, 3> outs{attention.q.get(), attention.k.get(), attention.v.get()};
    int64_t panels = 0;
    for (const PackedMatrix* m : matrices) panels += m->panels;
    share(panels, layer.q.panel_bytes, [&](int64_t begin, int64_t end) {
      for (size_t i = 0; i < matrices.size(); ++i) {
        const PackedMatrix& m = *matrices[i];
        if (begin < std::min(end, m.panels)) {
          auto t = task<LinearTask>(m, outs[i], m.rows);
          t.bias = m.bias;
          run_range(t, m.kernels->linear, begin, std::min(end, m.panels));
        }
        begin = std::max<int64_t>(0, begin - m.panels);
        end = std::max<int64_t>(0, end - m.panels);
      }
    });
  }

  void gate_up(const PackedMatrix& matrix) {
    auto t = task<GateUpTask>(matrix, shared_.gated.get(), step_.intermediate_size);
    t.gate_bias = matrix.bias;
    t.up_bias = matrix.up_bias;
    t.function = step_.activation;
    share(matrix.panels, matrix.panel_bytes,
          [&](int64_t begin, int64_t end) { run_range(t, matrix.kernels->gate_up, begin, end); });
  }

  void finish() {
    if (step_.final_norm != nullptr) {
      norm(*step_.final_norm);
    } else {
      use_rows(x_, step_.hidden_size);
    }
    if (step_.lm_head.kernels == nullptr) {
      if (rows_ == step_.x) return;
      member_.wait();  // every thread has read x
      const int64_t begin = member_.begin(step_.tokens()), end = member_.end(step_.tokens());
      std::memcpy(step_.x + begin * step_.hidden_size, rows_ + begin * step_.hidden_size,
                  static_cast<size_t>((end - begin) * step_.hidden_size) * sizeof(float));
      return;
    }
    const PackedMatrix& head = step_.lm_head;
    auto t = task<LinearTask>(head, step_.logits, head.rows);
    Best* best = step_.argmax ? shared_.best.data() + member_.index * step_.tokens() : nullptr;
    if (best != nullptr) std::fill_n(best, step_.tokens(), Best{kMinusInf, -1});
    share(head.panels, head.panel_bytes, [&](int64_t begin, int64_t end) {
      run_range(t, head.kernels->linear, begin, end);
      begin *= kPanelRows;
      end = std::min(head.rows, end * kPanelRows);
      scale_logits(begin, end);
      if (best != nullptr) find_best(begin, end, best);
    });
    if (best == nullptr) return;
    member_.wait();
    for (int64_t i = member_.begin(step_.tokens()); i < member_.end(step_.tokens()); ++i) {
      Best first = shared_.best[i];
      for (int64_t m = 1; m < member_.size; ++m) {
        first = better(first, shared_.best[m * step_.tokens() + i]);
      }
      step_.argmax[i] = first.index;
    }
  }

  void scale_logits(int64_t begin, int64_t end) const {
    // A soft-cap keeps the order of the logits.
    const float softcap = step_.argmax == nullptr ? step_.logits_softcap : 0.0f;
    if (step_.logits_scale == 1.0f && softcap == 0.0f) return;
    for (int64_t i = 0; i < step_.tokens(); ++i) {
      float* logits = step_.logits + i * step_.lm_head.rows;
      kernels_.scale_row(logits + begin, end - begin, step_.logits_scale, softcap);
    }
  }

  // best[token] = the better of itself and the logits of the rows [begin, end).
  void find_best(int64_t begin, int64_t end, Best* best) const {
    for (int64_t i = 0; i < step_.tokens(); ++i) {
      const float* logits = step_.logits + i * step_.lm_head.rows;
      const int64_t at = begin + kernels_.argmax_f32(logits + begin, end - begin);
      best[i] = better(best[i], {logits[at], at});
    }
  }

  // The larger, NaN the largest; the first of equals. An index below 0 is none.
  static Best better(const Best& a, const Best& b) {
    if (a.index < 0 || b.index < 0) return a.index < 0 ? b : a;
    const bool a_nan = std::isnan(a.value), b_nan = std::isnan(b.value);
    if (a_nan != b_nan) return a_nan ? a : b;
    if (!a_nan && a.value != b.value) return a.value > b.value ? a : b;
    return a.index < b.index ? a : b;
  }

  const DecoderStep& step_;
  const KernelTable& kernels_;
  Shared& shared_;
  const Workspace& space_;
  const TeamMember& member_;
  AttentionWorker attention_;
  const float* x_;  // the residual stream: that of all, or this thread's own

  int64_t phase_ = 0;  // of the queue
  const float* rows_ = nullptr;
  int64_t cols_ = 0;
  bool prepared_ = false;
  ActivationKind kind_ = kActF32;
  int64_t cols_padded_ = 0;
  const int32_t* order_ = nullptr;
};

// Whether what a layer adds to x is more than a product.
bool adds_in_two_steps(const DecoderStep& step) {
  const auto has_norm = [](const DecoderLayer& layer) {
    return layer.attention_out_norm.weight != nullptr || layer.mlp_out_norm.weight != nullptr;
  };
  return step.residual_scale != 1.0f ||
         std::any_of(step.layers.begin(), step.layers.end(), has_norm);
}

Workspace make_workspace(const DecoderStep& step) {
  const int64_t widest = std::max(step.hidden_size, step.num_heads * step.head_dim);
  int64_t bytes = 0;
  const auto widen = [&](const PackedMatrix& m) {
    if (m.kernels != nullptr) {
      bytes = std::max(bytes, row_bytes(m));
    }
  };
  for (const DecoderLayer& l : step.layers) {
    for (const PackedMatrix* m : {&l.q, &l.k, &l.v, &l.o, &l.gate_up, &l.down}) widen(*m);
  }
  widen(step.lm_head);
  Workspace space;
  space.rows = floats(step.tokens() * widest);
  space.norm = floats(step.hidden_size);
  space.gathered = floats(widest);
  if (adds_in_two_steps(step)) space.x = floats(step.tokens() * step.hidden_size);
  space.activation =
      std::make_unique_for_overwrite<char[]>(static_cast<size_t>(step.tokens() * bytes));
  return space;
}

}  // namespace

void run_decoder_step(const DecoderStep& step, const KernelTable& kernels, int64_t threads) {
  if (step.tokens() == 0) return;
  Shared shared{DecoderAttention(step, threads),
                PanelQueue(threads),
                floats(step.tokens() * step.intermediate_size),
                adds_in_two_steps(step) ? floats(step.tokens() * step.hidden_size) : nullptr,
                {}};
  if (step.argmax != nullptr) shared.best.resize(static_cast<size_t>(threads * step.tokens()));
  std::vector<Workspace> spaces;
  spaces.reserve(static_cast<size_t>(threads));
  for (int64_t t = 0; t < threads; ++t) spaces.push_back(make_workspace(step));
  run_team(threads, [&](const TeamMember& member) {
    Worker(step, kernels, shared, spaces[static_cast<size_t>(member.index)], member).run();
  });
}

}  // namespace fasttps::cpu
