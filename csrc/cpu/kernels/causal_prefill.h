// Included after attention.h. Many query rows: query, scores and output are transposed, so that a
// vector holds the same element of 4 to 64 query rows, and softmax needs no horizontal step (after
// STEEL, paper 002, whose cores split the work into the same three stages QK, softmax, PV). Blocks
// that no row may see are skipped.
//
// Both products are sums of outer products, a key or value element times a vector of query rows, in
// f32 (ConvertedProduct) or in pairs of bf16 (PairProduct, causal_prefill_bf16.h).
namespace fasttps::cpu {
namespace {

// to[c, r] = from[r, c] for r < columns, 0 for r >= rows. Columns and row_count are multiples of
// kLanes.
template <class Vec>
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t row_count,
                      int64_t columns, float* to, int64_t to_stride) {
  for (int64_t r = 0; r < row_count; r += Vec::kLanes) {
    for (int64_t c = 0; c < columns; c += Vec::kLanes) {
      Vec tile[Vec::kLanes];
      unrolled<Vec::kLanes>([&](int i) __attribute__((always_inline)) {
        tile[i] = r + i < rows ? Vec::load(from + (r + i) * from_stride + c) : Vec::set(0.0f);
      });
      transpose_lanes(tile);
      unrolled<Vec::kLanes>([&](int i) __attribute__((always_inline)) {
        tile[i].store(to + (c + i) * to_stride + r);
      });
    }
  }
}

// Bit r of by_key[j]: bit j of by_row[r]. Both are 64 words (Warren, Hacker's Delight, 7-3).
inline void transpose_bits(const uint64_t* by_row, int64_t rows, uint64_t* by_key) {
  for (int64_t i = 0; i < 64; ++i) by_key[i] = i < rows ? by_row[i] : 0;
  uint64_t mask = 0x00000000ffffffff;
  for (int64_t half = 32; half != 0; half /= 2, mask ^= mask << half) {
    for (int64_t k = 0; k < 64; k = ((k | half) + 1) & ~half) {
      const uint64_t swap = ((by_key[k] >> half) ^ by_key[k | half]) & mask;
      by_key[k] ^= swap << half;
      by_key[k | half] ^= swap;
    }
  }
}

// A matrix whose element (i, j) lies at data + i * i_bytes + j * j_bytes.
struct Factors {
  const char* data;
  int64_t i_bytes, j_bytes;
};

// c[i, column] = c[i, column] * rescale[column] + sum_j a(i, j) b[j, column] for kTile values of i
// and kVecs vectors of columns. rescale null: c is overwritten.
template <class Vec, class Product, int kTile, int kVecs>
[[gnu::always_inline]] inline void outer_product(const Factors& a, const typename Product::Word* b,
                                                 int64_t stride, int64_t depth,
                                                 const float* rescale, float* c) {
  Vec acc[kTile][kVecs];
  unrolled<kTile * kVecs>(
      [&](int i) __attribute__((always_inline)) { acc[i / kVecs][i % kVecs] = Vec::set(0.0f); });
  const char* factor = a.data;
  for (int64_t j = 0; j < depth; ++j, factor += a.j_bytes, b += stride) {
    typename Product::Operand columns[kVecs];
    unrolled<kVecs>([&](int v) __attribute__((always_inline)) {
      columns[v] = Product::load(b + v * Vec::kLanes);
    });
    unrolled<kTile>([&](int i) __attribute__((always_inline)) {
      const auto value = Product::broadcast(factor + i * a.i_bytes);
      unrolled<kVecs>([&](int v) __attribute__((always_inline)) {
        acc[i][v] = Product::add(acc[i][v], value, columns[v]);
      });
    });
  }
  unrolled<kVecs>([&](int v) __attribute__((always_inline)) {
    float* to = c + v * Vec::kLanes;
    if (rescale == nullptr) {
      unrolled<kTile>([&](int i)
                          __attribute__((always_inline)) { acc[i][v].store(to + i * stride); });
    } else {
      const Vec times = Vec::load(rescale + v * Vec::kLanes);
      unrolled<kTile>([&](int i) __attribute__((always_inline)) {
        fmadd(Vec::load(to + i * stride), times, acc[i][v]).store(to + i * stride);
      });
    }
  });
}

template <class Vec, class Product, int kVecs>
[[gnu::noinline]] void outer_products(Factors a, int64_t count, const typename Product::Word* b,
                                      int64_t stride, int64_t depth, const float* rescale,
                                      float* c) {
  constexpr int kTile = 6;  // with kVecs vectors, three quarters of the registers
  int64_t i = 0;
  const auto tile = [&]<int kRows>() __attribute__((always_inline)) {
    outer_product<Vec, Product, kRows, kVecs>(a, b, stride, depth, rescale, c);
    a.data += kRows * a.i_bytes;
    c += kRows * stride;
  };
  for (; i + kTile <= count; i += kTile) tile.template operator()<kTile>();
  const int64_t left = count - i;
  if ((left & 4) != 0) tile.template operator()<4>();
  if ((left & 2) != 0) tile.template operator()<2>();
  if ((left & 1) != 0) tile.template operator()<1>();
}

// The product above for i < count and all columns.
template <class Vec, class Product>
inline void transposed_matmul(const Factors& a, int64_t count, const typename Product::Word* b,
                              int64_t stride, int64_t depth, const float* rescale, float* c) {
  constexpr int kVecs = Vec::kLanes == 16 ? 4 : 2;
  int64_t column = 0;
  for (; column + kVecs * Vec::kLanes <= stride; column += kVecs * Vec::kLanes) {
    outer_products<Vec, Product, kVecs>(a, count, b + column, stride, depth,
                                        rescale ? rescale + column : nullptr, c + column);
  }
  for (; column < stride; column += Vec::kLanes) {
    outer_products<Vec, Product, 1>(a, count, b + column, stride, depth,
                                    rescale ? rescale + column : nullptr, c + column);
  }
}

// [..][stride] has one column a query row; stride is the rows rounded up to kLanes.
template <class Vec>
struct PrefillState {
  int64_t stride;
  float* out;     // [padded_dim][stride]
  float* scores;  // [kKeyBlock][stride]
  float* max;     // [stride]
  float* sum;
  float* rescale;
  float* rest;  // of the scratch, 64-byte aligned as all of the above

  explicit PrefillState(const AttentionTask& task) {
    stride = (task.rows + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes;
    out = aligned(task.scratch);
    scores = out + stride * task.padded_dim;
    max = scores + kKeyBlock * stride;
    sum = max + stride;
    rescale = sum + stride;
    rest = rescale + stride;
    transpose<Vec>(task.out, task.padded_dim, task.rows, stride, task.padded_dim, out, stride);
    for (int64_t r = 0; r < stride; ++r) {
      max[r] = r < task.rows ? task.max[r] : kMinusInf;
      sum[r] = r < task.rows ? task.sum[r] : 0.0f;
    }
  }

  void finish(const AttentionTask& task) const {
    for (int64_t r = 0; r < stride; r += Vec::kLanes) {
      for (int64_t c = 0; c < task.padded_dim; c += Vec::kLanes) {
        Vec tile[Vec::kLanes];
        unrolled<Vec::kLanes>([&](int i) __attribute__((always_inline)) {
          tile[i] = Vec::load(out + (c + i) * stride + r);
        });
        transpose_lanes(tile);
        unrolled<Vec::kLanes>([&](int i) __attribute__((always_inline)) {
          if (r + i < task.rows) tile[i].store(task.out + (r + i) * task.padded_dim + c);
        });
      }
    }
    for (int64_t r = 0; r < task.rows; ++r) {
      task.max[r] = max[r];
      task.sum[r] = sum[r];
    }
  }
};

// Products in f32; keys and values that are not f32 are converted a block at a time.
template <class Vec, class Element>
struct ConvertedProduct {
  using Word = float;
  using Operand = Vec;
  static constexpr bool kInPlace = sizeof(typename Element::Storage) == sizeof(float);
  static Vec load(const float* p) { return Vec::load(p); }
  static Vec broadcast(const char* p) {
    float x;
    __builtin_memcpy(&x, p, sizeof x);
    return Vec::set(x);
  }
  static Vec add(Vec acc, Vec a, Vec b) { return fmadd(a, b, acc); }

  const AttentionTask& task;
  const PrefillState<Vec>& s;
  float* query;  // [padded_dim][stride]
  float* rows;   // [kKeyBlock][padded_dim], keys, then values

  ConvertedProduct(const AttentionTask& t, const PrefillState<Vec>& state)
      : task(t), s(state), query(s.rest), rows(query + s.stride * t.padded_dim) {
    transpose<Vec>(task.query, task.padded_dim, task.rows, s.stride, task.padded_dim, query,
                   s.stride);
  }
  static float score_factor(const AttentionTask&) { return 1.0f; }

  // Row j of a block, and how far rows lie apart in floats.
  struct Rows {
    const float* data;
    int64_t stride;
  };
  Rows block_rows(const KeyBlock& block, const typename Element::Storage* from,
                  int64_t stride) const {
    if constexpr (kInPlace) return {from, stride};
    for (int64_t j = 0; j < block.count; ++j) {
      load_row<Vec, Element>(from + j * stride, rows + j * task.padded_dim, task.head_dim);
    }
    return {rows, task.padded_dim};
  }

  void scores(const KeyBlock& block) const {
    const Rows k = block_rows(block, key_row<Element>(task, block.position), task.k_stride);
    transposed_matmul<Vec, ConvertedProduct>(
        {reinterpret_cast<const char*>(k.data), k.stride * 4, 4}, block.count, query, s.stride,
        task.head_dim, nullptr, s.scores);
  }

  // Weights of key j, vector at column r; of pairs of keys from even j on.
  void put_weights(int64_t j, int64_t r, Vec even, Vec odd) const {
    even.store(s.scores + j * s.stride + r);
    odd.store(s.scores + (j + 1) * s.stride + r);
  }
  float weight(int64_t j, int64_t r) const { return s.scores[j * s.stride + r]; }

  void values(const KeyBlock& block) const {
    const Rows v = block_rows(block, value_row<Element>(task, block.position), task.v_stride);
    transposed_matmul<Vec, ConvertedProduct>(
        {reinterpret_cast<const char*>(v.data), 4, v.stride * 4}, task.head_dim, s.scores, s.stride,
        block.count, s.rescale, s.out);
  }
};

// Turns the scores of a block into weights 2^(score - max), times the scale of their value row;
// updates max and sum.
template <class Vec, class Element, class Product>
void prefill_softmax(const AttentionTask& task, const KeyBlock& block, const PrefillState<Vec>& s,
                     const Product& product) {
  // Scores of an odd last key's partner, which does not exist.
  const int64_t count = (block.count + 1) / 2 * 2;
  for (int64_t r = 0; block.count < count && r < s.stride; ++r) {
    s.scores[block.count * s.stride + r] = kMinusInf;
  }
  float factor = Product::score_factor(task);
  const bool softcap = task.softcap_log2 > 0.0f;
  if (Element::kScaled || softcap || block.partial) {
    uint64_t by_key[kKeyBlock];
    if (block.partial) transpose_bits(block.allowed, task.rows, by_key);
    for (int64_t j = 0; j < block.count; ++j) {
      const Vec times = Vec::set(factor * key_scale<Element>(task, block.position + j));
      for (int64_t r = 0; r < s.stride; r += Vec::kLanes) {
        float* at = s.scores + j * s.stride + r;
        Vec score = Vec::load(at) * times;
        if (softcap) score = Vec::set(task.softcap_log2) * tanh(score);
        if (block.partial) {
          score = select_bits(static_cast<uint32_t>(by_key[j] >> r), score, Vec::set(kMinusInf));
        }
        score.store(at);
      }
    }
    factor = 1.0f;
  }
  const Vec times = Vec::set(factor);
  for (int64_t r = 0; r < s.stride; r += Vec::kLanes) {
    const Vec old_max = Vec::load(s.max + r);
    Vec largest = Vec::set(kMinusInf), largest_odd = largest;
    for (int64_t j = 0; j < count; j += 2) {
      largest = max(Vec::load(s.scores + j * s.stride + r), largest);
      largest_odd = max(Vec::load(s.scores + (j + 1) * s.stride + r), largest_odd);
    }
    const Vec new_max = max(max(largest, largest_odd) * times, old_max);
    const Vec shift = finite_max(new_max);
    Vec sum = Vec::set(0.0f), sum_odd = sum;
    for (int64_t j = 0; j < count; j += 2) {
      const float* at = s.scores + j * s.stride + r;
      Vec even = exp2(Vec::load(at) * times - shift);
      Vec odd = exp2(Vec::load(at + s.stride) * times - shift);
      sum = sum + even;
      sum_odd = sum_odd + odd;
      if constexpr (Element::kScaled) {
        even = even * Vec::set(value_scale<Element>(task, block.position + j));
        if (j + 1 < block.count) {
          odd = odd * Vec::set(value_scale<Element>(task, block.position + j + 1));
        }
      }
      product.put_weights(j, r, even, odd);
    }
    const Vec rescale = exp2(old_max - shift);
    fmadd(Vec::load(s.sum + r), rescale, sum + sum_odd).store(s.sum + r);
    new_max.store(s.max + r);
    rescale.store(s.rescale + r);
  }
}

template <class Vec, class Element>
inline bool all_values_finite(const AttentionTask& task, const KeyBlock& block) {
  Vec zero = Vec::set(0.0f);
  for (int64_t j = 0; j < block.count; ++j) {
    const auto* v = value_row<Element>(task, block.position + j);
    const Vec factor = Vec::set(0.0f * value_scale<Element>(task, block.position + j));
    for (int64_t d = 0; d < task.head_dim; d += Vec::kLanes) {  // NaN * 0 = inf * 0 = NaN
      zero = fmadd(load_up_to<Vec, Element>(v + d, task.head_dim - d), factor, zero);
    }
  }
  return reduce_add(zero) == 0.0f;
}

// The slow exact way for a block where some row must not see a value that is NaN or infinite.
template <class Vec, class Element, class Product>
void prefill_values_excluding(const AttentionTask& task, const KeyBlock& block,
                              const PrefillState<Vec>& s, const Product& product) {
  for (int64_t d = 0; d < task.head_dim; ++d) {
    for (int64_t r = 0; r < task.rows; ++r) {
      float total = 0.0f;
      for (int64_t j = 0; j < block.count; ++j) {
        if ((block.allowed[r] >> j & 1) == 0) continue;
        float value;
        load_row<Vec, Element>(value_row<Element>(task, block.position + j) + d, &value, 1);
        total += product.weight(j, r) * value;
      }
      s.out[d * s.stride + r] = s.out[d * s.stride + r] * s.rescale[r] + total;
    }
  }
}

// Fetches `count` rows of a cache into the second-level cache.
template <class Storage>
inline void prefetch_rows(const Storage* rows, int64_t stride, int64_t count, int64_t head_dim) {
  for (int64_t j = 0; j < count; ++j) {
    const auto* row = reinterpret_cast<const char*>(rows + j * stride);
    for (int64_t i = 0; i < head_dim * static_cast<int64_t>(sizeof(Storage)); i += 64) {
      __builtin_prefetch(row + i, 0, 2);
    }
  }
}

template <class Vec, class Element, class Product>
void prefill_with(const AttentionTask& task) {
  const PrefillState<Vec> s(task);
  const Product product(task, s);
  for (int64_t position = task.begin; position < task.end; position += kKeyBlock) {
    const KeyBlock block = key_block(task, position);
    if (!block.any) continue;
    const int64_t next = position + kKeyBlock;
    const int64_t left = task.end - next, ahead = left < kKeyBlock ? left : kKeyBlock;
    prefetch_rows(key_row<Element>(task, next), task.k_stride, ahead, task.head_dim);
    product.scores(block);
    prefetch_rows(value_row<Element>(task, next), task.v_stride, ahead, task.head_dim);
    prefill_softmax<Vec, Element>(task, block, s, product);
    if (block.partial && !all_values_finite<Vec, Element>(task, block)) {
      prefill_values_excluding<Vec, Element>(task, block, s, product);
    } else {
      product.values(block);
    }
  }
  s.finish(task);
}

// See AttentionTask.
template <class Vec, class Element>
void causal_prefill(const AttentionTask& task) {
  prefill_with<Vec, Element, ConvertedProduct<Vec, Element>>(task);
}

}  // namespace
}  // namespace fasttps::cpu
