// Included after attention.h. Few query rows: every cache row is read once for all of them, four at
// a time. A score is a dot product along head_dim; the partial sums of kLanes scores are added up
// together (sum_each). While the keys of a block are read its values are fetched, and while these
// are read the keys of the next block are.
//
// A row of head_dim elements is worked on in chunks of 2 kLanes as load_chunk delivers them; query
// and output lie in scratch in that order, zero past head_dim.
namespace fasttps::cpu {
namespace {

// kHeadDim 0: any.
template <class Vec, class Element, int64_t kHeadDim>
struct Decode {
  using Storage = typename Element::Storage;
  static constexpr int64_t kChunk = 2 * Vec::kLanes;
  static constexpr int64_t kMostRows = Vec::kLanes >= 4 ? 4 : 1;
  static constexpr int kAllChunks =
      kHeadDim % kChunk == 0 ? static_cast<int>(kHeadDim / kChunk) : 0;

  const AttentionTask& task;
  const int64_t head_dim, chunks;
  float* query;    // [rows rounded up to kMostRows][width]
  float* out;      // likewise
  float* sums;     // [rows][kLanes], sums of weights
  float* weights;  // [kMostRows][kKeyBlock]
  float* k_scale;  // [kKeyBlock]
  float* v_scale;  // [kKeyBlock]

  explicit Decode(const AttentionTask& t)
      : task(t),
        head_dim(kHeadDim != 0 ? kHeadDim : t.head_dim),
        chunks(kAllChunks != 0 ? kAllChunks : (head_dim + kChunk - 1) / kChunk) {
    const int64_t rows = (t.rows + kMostRows - 1) / kMostRows * kMostRows;
    query = aligned(t.scratch);
    out = query + rows * width();
    sums = out + rows * width();
    weights = sums + rows * Vec::kLanes;
    k_scale = weights + kMostRows * kKeyBlock;
    v_scale = k_scale + kKeyBlock;
  }

  int64_t width() const { return (kAllChunks != 0 ? kAllChunks : chunks) * kChunk; }

  // One row between the order of AttentionTask, [padded_dim], and the order of chunks, [width].
  void to_chunks(const float* row, float* chunked) const {
    for (int64_t c = 0; c < chunks; ++c) {
      Vec a, b;
      if ((c + 1) * kChunk <= task.padded_dim) {
        a = Vec::load(row + c * kChunk);
        b = Vec::load(row + c * kChunk + Vec::kLanes);
      } else {
        load_chunk_partial<Vec, F32>(row + c * kChunk, task.padded_dim - c * kChunk, a, b);
      }
      if constexpr (Element::kSplitsPairs) deinterleave(a, b, a, b);
      a.store(chunked + c * kChunk);
      b.store(chunked + c * kChunk + Vec::kLanes);
    }
  }
  void from_chunks(const float* chunked, float* row) const {
    for (int64_t c = 0; c < chunks; ++c) {
      Vec a = Vec::load(chunked + c * kChunk);
      Vec b = Vec::load(chunked + c * kChunk + Vec::kLanes);
      if constexpr (Element::kSplitsPairs) interleave(a, b, a, b);
      const int64_t left = task.padded_dim - c * kChunk;
      if (left >= Vec::kLanes) a.store(row + c * kChunk);
      if (left >= kChunk) b.store(row + c * kChunk + Vec::kLanes);
      if (left < Vec::kLanes) store_partial<Vec, F32>(a, row + c * kChunk, left);
    }
  }

  // Chunk `c` of a row.
  [[gnu::always_inline]] void load_chunk_at(const Storage* row, int64_t c, Vec& a, Vec& b) const {
    if (kAllChunks != 0 || (c + 1) * kChunk <= head_dim) {
      load_chunk<Vec, Element>(row + c * kChunk, a, b);
    } else {
      load_chunk_partial<Vec, Element>(row + c * kChunk, head_dim - c * kChunk, a, b);
    }
  }

  // Fetches the cache lines that begin in chunk `c` of a row.
  [[gnu::always_inline]] static void prefetch_chunk(const Storage* row, int64_t c) {
    constexpr int64_t kBytes = kChunk * static_cast<int64_t>(sizeof(Storage));
    const auto* bytes = reinterpret_cast<const char*>(row) + c * kBytes;
    if (kBytes >= 64 || c % (64 / kBytes) == 0) {
      for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(bytes + i, 0, 3);
    }
  }

  template <class Body>
  [[gnu::always_inline]] void each_chunk(const Body& body) const {
    if constexpr (kAllChunks != 0) {
      unrolled<kAllChunks>(body);
    } else {
      for (int64_t c = 0; c < chunks; ++c) body(c);
    }
  }

  // weights[r, j] = query_r . k_j for kRows rows and the keys of a block; beyond them, anything.
  template <int kRows>
  [[gnu::always_inline]] void scores(const KeyBlock& block, int64_t row) const {
    constexpr int kKeys = static_cast<int>(Vec::kLanes) / kRows;
    const float* q = query + row * width();
    const Storage* k = key_row<Element>(task, block.position);
    const Storage* v = value_row<Element>(task, block.position);
    const int64_t k_stride = task.k_stride, v_stride = task.v_stride;
    int64_t offset[kKeys];  // of the keys of a tile; keys past the last are the last one again
    for (int i = 0; i < kKeys; ++i) offset[i] = i * k_stride;
    for (int64_t j = 0; j < block.count; j += kKeys, k += kKeys * k_stride, v += kKeys * v_stride) {
      if (block.count - j < kKeys) {
        for (int i = 0; i < kKeys; ++i) {
          offset[i] = (i < block.count - j ? i : block.count - j - 1) * k_stride;
        }
      }
      Vec dot[kRows * kKeys];
      if constexpr (kRows == 1) {
        unrolled<kKeys>([&](int i) __attribute__((always_inline)) {
          Vec first = Vec::set(0.0f), second = Vec::set(0.0f);
          each_chunk([&](int64_t c) __attribute__((always_inline)) {
            Vec a, b;
            load_chunk_at(k + offset[i], c, a, b);
            prefetch_chunk(v + i * v_stride, c);
            first = fmadd(Vec::load(q + c * kChunk), a, first);
            second = fmadd(Vec::load(q + c * kChunk + Vec::kLanes), b, second);
          });
          dot[i] = first + second;
        });
        sum_each(dot).store(weights + j);
      } else {
        unrolled<kRows * kKeys>([&](int i)
                                    __attribute__((always_inline)) { dot[i] = Vec::set(0.0f); });
        each_chunk([&](int64_t c) __attribute__((always_inline)) {
          Vec query_a[kRows], query_b[kRows];
          unrolled<kRows>([&](int r) __attribute__((always_inline)) {
            query_a[r] = Vec::load(q + r * width() + c * kChunk);
            query_b[r] = Vec::load(q + r * width() + c * kChunk + Vec::kLanes);
          });
          unrolled<kKeys>([&](int i) __attribute__((always_inline)) {
            Vec a, b;
            load_chunk_at(k + offset[i], c, a, b);
            prefetch_chunk(v + i * v_stride, c);
            unrolled<kRows>([&](int r) __attribute__((always_inline)) {
              dot[r * kKeys + i] = fmadd(query_a[r], a, dot[r * kKeys + i]);
              dot[r * kKeys + i] = fmadd(query_b[r], b, dot[r * kKeys + i]);
            });
          });
        });
        store_parts<kRows>(sum_each(dot), weights + j, kKeyBlock);
      }
    }
  }

  // Turns the scores of one row into weights 2^(score - max), times the scale of their value row;
  // updates max and sums; returns the factor of what was accumulated before.
  [[gnu::always_inline]] float softmax(const KeyBlock& block, int64_t row, float* w,
                                       const float* k_factor, const float* v_factor) const {
    constexpr int kVecs = static_cast<int>(kKeyBlock / Vec::kLanes);
    constexpr int kUnrolled = kVecs > 8 ? 1 : kVecs;  // scores that are kept in registers
    const bool softcap = task.softcap_log2 > 0.0f, all = block.allowed[row] == ~uint64_t{0};
    const float old_max = task.max[row];
    Vec largest = Vec::set(old_max), sum = Vec::set(0.0f);
    for (int begin = 0; begin < kVecs; begin += kUnrolled) {
      unrolled<kUnrolled>([&](int i) __attribute__((always_inline)) {
        const int64_t at = (begin + i) * Vec::kLanes;
        Vec score = Vec::load(w + at);
        if constexpr (Element::kScaled) score = score * Vec::load(k_factor + at);
        if (softcap) score = Vec::set(task.softcap_log2) * tanh(score);
        if (!all) {
          const auto bits = static_cast<uint32_t>(block.allowed[row] >> at);
          score = select_bits(bits, score, Vec::set(kMinusInf));
        }
        if (Element::kScaled || softcap || !all) score.store(w + at);
        largest = max(score, largest);
      });
    }
    const float new_max = reduce_max(largest);
    const Vec shift = Vec::set(finite_max(new_max));
    for (int begin = 0; begin < kVecs; begin += kUnrolled) {
      unrolled<kUnrolled>([&](int i) __attribute__((always_inline)) {
        const int64_t at = (begin + i) * Vec::kLanes;
        Vec weight = exp2(Vec::load(w + at) - shift);
        sum = sum + weight;
        if constexpr (Element::kScaled) weight = weight * Vec::load(v_factor + at);
        weight.store(w + at);
      });
    }
    const Vec rescale = exp2(Vec::set(old_max) - shift);
    float* sum_lanes = sums + row * Vec::kLanes;
    fmadd(Vec::load(sum_lanes), rescale, sum).store(sum_lanes);
    task.max[row] = new_max;
    return first_lane(rescale);
  }

  // out_r = out_r * rescale_r + sum_j w[r, j] v_j for kRows rows and kChunks chunks from `c` on.
  // The weight of a position that no row may see is 0; with kExcluded the positions whose bit is 0
  // are left out, so that whatever lies there does not matter.
  template <int kRows, int kChunks, bool kExcluded>
  [[gnu::always_inline]] void values_at(const KeyBlock& block, uint64_t bits, int64_t row,
                                        int64_t c, const float* w, const float* rescale,
                                        const Storage* ahead, int64_t ahead_stride) const {
    Vec total[kRows][2 * kChunks];
    unrolled<kRows>([&](int r) __attribute__((always_inline)) {
      unrolled<2 * kChunks>([&](int i)
                                __attribute__((always_inline)) { total[r][i] = Vec::set(0.0f); });
    });
    const Storage* v = value_row<Element>(task, block.position);
    const int64_t v_stride = task.v_stride;
    if (kAllChunks != 0) v += c * kChunk;
    ahead += c * kChunk;
    for (int64_t j = 0; j < block.count; ++j, v += v_stride, ahead += ahead_stride) {
      if (kExcluded && (bits >> j & 1) == 0) continue;
      Vec value[2 * kChunks];
      unrolled<kChunks>([&](int i) __attribute__((always_inline)) {
        load_chunk_at(v, kAllChunks != 0 ? i : c + i, value[2 * i], value[2 * i + 1]);
        prefetch_chunk(ahead, i);
      });
      unrolled<kRows>([&](int r) __attribute__((always_inline)) {
        const Vec weight = Vec::set(w[r * kKeyBlock + j]);
        unrolled<2 * kChunks>([&](int i) __attribute__((always_inline)) {
          total[r][i] = fmadd(weight, value[i], total[r][i]);
        });
      });
    }
    unrolled<kRows>([&](int r) __attribute__((always_inline)) {
      const Vec factor = Vec::set(rescale[r]);
      unrolled<2 * kChunks>([&](int i) __attribute__((always_inline)) {
        float* to = out + (row + r) * width() + c * kChunk + i * Vec::kLanes;
        fmadd(Vec::load(to), factor, total[r][i]).store(to);
      });
    });
  }

  template <int kRows, bool kExcluded>
  [[gnu::noinline]] void values(const KeyBlock& block, uint64_t bits, int64_t row, const float* w,
                                const float* rescale, const Storage* ahead,
                                int64_t ahead_stride) const {
    // Accumulators: half of 16 registers, three quarters of 32.
    constexpr int kMost = (Vec::kLanes == 16 ? 24 : 8) / (2 * kRows);
    constexpr int kPasses = (kAllChunks + kMost - 1) / kMost;
    constexpr int kEach = kAllChunks == 0 ? 1 : (kAllChunks + kPasses - 1) / kPasses;
    int64_t c = 0;
    for (; c + kEach <= chunks; c += kEach) {
      values_at<kRows, kEach, kExcluded>(block, bits, row, c, w, rescale, ahead, ahead_stride);
    }
    if constexpr (kAllChunks % kEach != 0) {
      values_at<kRows, kAllChunks % kEach, kExcluded>(block, bits, row, c, w, rescale, ahead,
                                                      ahead_stride);
    }
  }

  template <int kRows>
  [[gnu::noinline]] void rows_of_block(const KeyBlock& block, int64_t row, const float* k_factor,
                                       const float* v_factor, bool more) const {
    float rescale[kRows];
    scores<kRows>(block, row);
    for (int r = 0; r < kRows; ++r) {
      const bool inside = row + r < task.rows;  // a row beyond is computed and never read
      rescale[r] =
          inside ? softmax(block, row + r, weights + r * kKeyBlock, k_factor, v_factor) : 1.0f;
    }
    const Storage* ahead = more ? key_row<Element>(task, block.position + kKeyBlock)
                                : value_row<Element>(task, block.position);
    const int64_t stride = more ? task.k_stride : task.v_stride;
    if (!block.partial) {
      values<kRows, false>(block, block.all, row, weights, rescale, ahead, stride);
    } else if (block.alike) {
      values<kRows, true>(block, block.seen, row, weights, rescale, ahead, stride);
    } else {
      for (int r = 0; r < kRows && row + r < task.rows; ++r) {
        values<1, true>(block, block.allowed[row + r], row + r, weights + r * kKeyBlock,
                        rescale + r, ahead, stride);
      }
    }
  }

  // Factors of the rows of a block: in place where a whole block of them lies dense.
  const float* factors(const float* scale, int64_t stride, const KeyBlock& block,
                       float* copy) const {
    if constexpr (!Element::kScaled) return nullptr;
    const float* from = scale + (block.position - task.slot_shift) * stride;
    if (stride == 1 && block.count == kKeyBlock) return from;
    for (int64_t j = 0; j < kKeyBlock; ++j) copy[j] = j < block.count ? from[j * stride] : 0.0f;
    return copy;
  }

  void run() const {
    for (int64_t r = 0; r < task.rows; ++r) {
      to_chunks(task.query + r * task.padded_dim, query + r * width());
      to_chunks(task.out + r * task.padded_dim, out + r * width());
      for (int64_t i = 0; i < Vec::kLanes; ++i) sums[r * Vec::kLanes + i] = 0.0f;
      sums[r * Vec::kLanes] = task.sum[r];
    }
    for (int64_t i = task.rows * width(); i % (kMostRows * width()) != 0; ++i)
      query[i] = out[i] = 0.0f;
    for (int64_t position = task.begin; position < task.end; position += kKeyBlock) {
      const KeyBlock block = key_block(task, position);
      if (!block.any) continue;
      const float* k_factor = factors(task.k_scale, task.k_scale_stride, block, k_scale);
      const float* v_factor = factors(task.v_scale, task.v_scale_stride, block, v_scale);
      const bool more = position + 2 * kKeyBlock <= task.end;
      for (int64_t row = 0; row < task.rows;) {
        const int64_t left = task.rows - row;
        if constexpr (kMostRows == 4) {
          if (left > 2) {
            rows_of_block<4>(block, row, k_factor, v_factor, more);
            row += 4;
            continue;
          }
          if (left == 2) {
            rows_of_block<2>(block, row, k_factor, v_factor, more);
            row += 2;
            continue;
          }
        }
        rows_of_block<1>(block, row, k_factor, v_factor, more);
        row += 1;
      }
    }
    for (int64_t r = 0; r < task.rows; ++r) {
      from_chunks(out + r * width(), task.out + r * task.padded_dim);
      task.sum[r] = reduce_add(Vec::load(sums + r * Vec::kLanes));
    }
  }
};

// See AttentionTask.
template <class Vec, class Element>
void rope_attention_decode(const AttentionTask& task) {
  if constexpr (Vec::kLanes > 1) {
    switch (task.head_dim) {
      case 64:
        return Decode<Vec, Element, 64>(task).run();
      case 96:
        return Decode<Vec, Element, 96>(task).run();
      case 128:
        return Decode<Vec, Element, 128>(task).run();
    }
  }
  Decode<Vec, Element, 0>(task).run();
}

}  // namespace
}  // namespace fasttps::cpu
