// Included after attention.h. Many query rows: keys and values of a block are converted to f32
// once, query, scores and output are transposed, so that a vector holds the same element of 4 to 64
// query rows, and softmax needs no horizontal step (after STEEL, paper 002, whose cores split the
// work into the same three stages QK, softmax, PV). Blocks that no row may see are skipped.
namespace fasttps::cpu {
namespace {

// query, out, scores: [..][stride] with one column a row, stride the rows rounded up to kLanes.
template <class Vec>
struct PrefillScratch {
  int64_t stride;
  float* query;   // [head_dim][stride]
  float* out;     // [head_dim][stride]
  float* key;     // [kKeyBlock][padded_dim]
  float* value;   // [kKeyBlock][padded_dim]
  float* scores;  // [kKeyBlock][stride]
  float* max;     // [stride]
  float* sum;
  float* rescale;

  explicit PrefillScratch(const AttentionTask& task) {
    stride = (task.rows + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes;
    query = task.scratch;
    out = query + kMaxQueryRows * task.padded_dim;
    key = out + kMaxQueryRows * task.padded_dim;
    value = key + kKeyBlock * task.padded_dim;
    scores = value + kKeyBlock * task.padded_dim;
    max = scores + kKeyBlock * kMaxQueryRows;
    sum = max + kMaxQueryRows;
    rescale = sum + kMaxQueryRows;
  }
};

// c[i, column] = c[i, column] * rescale[column] + sum_j a(i, j) b[j, column] for kTile values of i
// and kVecs vectors of columns; a(i, j) = a[i * a_i + j * a_j]. rescale null: c is overwritten.
template <class Vec, int kTile, int kVecs>
inline void outer_product(const float* a, int64_t a_i, int64_t a_j, const float* b, int64_t stride,
                          int64_t depth, const float* rescale, float* c) {
  Vec acc[kTile][kVecs];
  for (int i = 0; i < kTile; ++i) {
    for (int v = 0; v < kVecs; ++v) acc[i][v] = Vec::set(0.0f);
  }
  for (int64_t j = 0; j < depth; ++j) {
    Vec columns[kVecs];
    for (int v = 0; v < kVecs; ++v) columns[v] = Vec::load(b + j * stride + v * Vec::kLanes);
    for (int i = 0; i < kTile; ++i) {
      const Vec factor = Vec::set(a[i * a_i + j * a_j]);
      for (int v = 0; v < kVecs; ++v) acc[i][v] = fmadd(factor, columns[v], acc[i][v]);
    }
  }
  for (int i = 0; i < kTile; ++i) {
    for (int v = 0; v < kVecs; ++v) {
      float* to = c + i * stride + v * Vec::kLanes;
      if (rescale != nullptr) {
        acc[i][v] = fmadd(Vec::load(to), Vec::load(rescale + v * Vec::kLanes), acc[i][v]);
      }
      acc[i][v].store(to);
    }
  }
}

template <class Vec, int kVecs>
inline void outer_products(const float* a, int64_t a_i, int64_t a_j, int64_t count, const float* b,
                           int64_t stride, int64_t depth, const float* rescale, float* c) {
  constexpr int kTile = Vec::kLanes == 16 ? 6 : 4;  // accumulators that fit the registers
  int64_t i = 0;
  for (; i + kTile <= count; i += kTile) {
    outer_product<Vec, kTile, kVecs>(a + i * a_i, a_i, a_j, b, stride, depth, rescale,
                                     c + i * stride);
  }
  for (; i < count; ++i) {
    outer_product<Vec, 1, kVecs>(a + i * a_i, a_i, a_j, b, stride, depth, rescale, c + i * stride);
  }
}

// The product above for i < count and all columns.
template <class Vec>
inline void transposed_matmul(const float* a, int64_t a_i, int64_t a_j, int64_t count,
                              const float* b, int64_t stride, int64_t depth, const float* rescale,
                              float* c) {
  constexpr int kVecs = Vec::kLanes == 16 ? 4 : 2;
  int64_t column = 0;
  for (; column + kVecs * Vec::kLanes <= stride; column += kVecs * Vec::kLanes) {
    outer_products<Vec, kVecs>(a, a_i, a_j, count, b + column, stride, depth,
                               rescale ? rescale + column : nullptr, c + column);
  }
  for (; column < stride; column += Vec::kLanes) {
    outer_products<Vec, 1>(a, a_i, a_j, count, b + column, stride, depth,
                           rescale ? rescale + column : nullptr, c + column);
  }
}

template <class Vec, class Element>
inline void load_block(const AttentionTask& task, const KeyBlock& block, float* key, float* value) {
  for (int64_t j = 0; j < block.count; ++j) {
    const int64_t position = block.position + j;
    float* k = key + j * task.padded_dim;
    float* v = value + j * task.padded_dim;
    load_row<Vec, Element>(key_row<Element>(task, position), k, task.head_dim);
    load_row<Vec, Element>(value_row<Element>(task, position), v, task.head_dim);
    if constexpr (Element::kScaled) {
      for (int64_t d = 0; d < task.head_dim; ++d) k[d] *= key_scale<Element>(task, position);
      for (int64_t d = 0; d < task.head_dim; ++d) v[d] *= value_scale<Element>(task, position);
    }
  }
}

template <class Vec>
void prefill_softmax(const AttentionTask& task, const KeyBlock& block,
                     const PrefillScratch<Vec>& s) {
  if (task.softcap_log2 > 0.0f) {
    for (int64_t i = 0; i < block.count * s.stride; i += Vec::kLanes) {
      (Vec::set(task.softcap_log2) * tanh(Vec::load(s.scores + i))).store(s.scores + i);
    }
  }
  if (block.partial) {
    for (int64_t r = 0; r < task.rows; ++r) {
      for (int64_t j = 0; j < block.count; ++j) {
        if ((block.allowed[r] >> j & 1) == 0) s.scores[j * s.stride + r] = kMinusInf;
      }
    }
  }
  for (int64_t r = 0; r < s.stride; r += Vec::kLanes) {
    const Vec old_max = Vec::load(s.max + r);
    Vec new_max = old_max;
    for (int64_t j = 0; j < block.count; ++j) {
      new_max = max(Vec::load(s.scores + j * s.stride + r), new_max);
    }
    const Vec shift = finite_max(new_max);
    Vec sum = Vec::set(0.0f);
    for (int64_t j = 0; j < block.count; ++j) {
      float* score = s.scores + j * s.stride + r;
      const Vec weight = exp2(Vec::load(score) - shift);
      weight.store(score);
      sum = sum + weight;
    }
    const Vec rescale = exp2(old_max - shift);
    fmadd(Vec::load(s.sum + r), rescale, sum).store(s.sum + r);
    new_max.store(s.max + r);
    rescale.store(s.rescale + r);
  }
}

template <class Vec>
inline bool all_finite(const float* rows, int64_t row_count, int64_t row_stride, int64_t count) {
  Vec zero = Vec::set(0.0f);
  float tail = 0.0f;
  for (int64_t j = 0; j < row_count; ++j) {
    const float* x = rows + j * row_stride;
    int64_t d = 0;
    for (; d + Vec::kLanes <= count; d += Vec::kLanes) {
      zero = fmadd(Vec::load(x + d), Vec::set(0.0f), zero);  // NaN * 0 = inf * 0 = NaN
    }
    for (; d < count; ++d) tail += x[d] * 0.0f;
  }
  return reduce_add(zero) + tail == 0.0f;
}

// The slow exact way for a block where some row must not see a value that is NaN or infinite.
template <class Vec>
void prefill_values_excluding(const AttentionTask& task, const KeyBlock& block,
                              const PrefillScratch<Vec>& s) {
  for (int64_t d = 0; d < task.head_dim; ++d) {
    for (int64_t r = 0; r < task.rows; ++r) {
      float total = 0.0f;
      for (int64_t j = 0; j < block.count; ++j) {
        if ((block.allowed[r] >> j & 1) == 0) continue;
        total += s.scores[j * s.stride + r] * s.value[j * task.padded_dim + d];
      }
      s.out[d * s.stride + r] = s.out[d * s.stride + r] * s.rescale[r] + total;
    }
  }
}

// See AttentionTask.
template <class Vec, class Element>
void causal_prefill(const AttentionTask& task) {
  const PrefillScratch<Vec> s(task);
  for (int64_t r = 0; r < s.stride; ++r) {
    const bool inside = r < task.rows;
    for (int64_t d = 0; d < task.head_dim; ++d) {
      s.query[d * s.stride + r] = inside ? task.query[r * task.padded_dim + d] : 0.0f;
      s.out[d * s.stride + r] = inside ? task.out[r * task.padded_dim + d] : 0.0f;
    }
    s.max[r] = inside ? task.max[r] : kMinusInf;
    s.sum[r] = inside ? task.sum[r] : 0.0f;
  }
  for (int64_t position = task.begin; position < task.end; position += kKeyBlock) {
    const KeyBlock block = key_block(task, position);
    if (!block.any) continue;
    load_block<Vec, Element>(task, block, s.key, s.value);
    transposed_matmul<Vec>(s.key, task.padded_dim, 1, block.count, s.query, s.stride, task.head_dim,
                           nullptr, s.scores);
    prefill_softmax(task, block, s);
    if (block.partial && !all_finite<Vec>(s.value, block.count, task.padded_dim, task.head_dim)) {
      prefill_values_excluding(task, block, s);
    } else {
      transposed_matmul<Vec>(s.value, 1, task.padded_dim, task.head_dim, s.scores, s.stride,
                             block.count, s.rescale, s.out);
    }
  }
  for (int64_t r = 0; r < task.rows; ++r) {
    for (int64_t d = 0; d < task.head_dim; ++d) {
      task.out[r * task.padded_dim + d] = s.out[d * s.stride + r];
    }
    task.max[r] = s.max[r];
    task.sum[r] = s.sum[r];
  }
}

}  // namespace
}  // namespace fasttps::cpu
