// Included after decode_product.h. The memory of rope_attention_decode, and how rows are read.
//
// A row of head_dim elements is worked on in chunks of 2 kLanes; query and output lie in scratch in
// chunks, zero past head_dim, in the order that the product and load_chunk deliver.
namespace fasttps::cpu {
namespace {

// kHeadDim 0: any.
template <class Vec, class Element, class Product, int64_t kHeadDim>
struct DecodeRows {
  using Storage = typename Element::Storage;
  using Query = typename Product::Query;
  static constexpr int64_t kChunk = 2 * Vec::kLanes;
  static constexpr int64_t kMostRows = Vec::kLanes >= 4 ? 4 : 1;
  static constexpr int kAllChunks =
      kHeadDim % kChunk == 0 ? static_cast<int>(kHeadDim / kChunk) : 0;
  static constexpr bool kWords = Product::kWords;

  const AttentionTask& task;
  const int64_t head_dim, chunks;
  Query* query;         // [rows rounded up to kMostRows][width]
  float* out;           // [the same][width]
  float* sums;          // [rows][kLanes], sums of weights
  float* weights;       // [kMostRows][kKeyBlock]; scores at first
  float* k_scale;       // [kKeyBlock]
  float* v_scale;       // [kKeyBlock]
  Query* word_weights;  // [kMostRows][kKeyBlock]
  float* score_factor;  // [rows], where the product has one

  explicit DecodeRows(const AttentionTask& t)
      : task(t),
        head_dim(kHeadDim != 0 ? kHeadDim : t.head_dim),
        chunks(kAllChunks != 0 ? kAllChunks : (head_dim + kChunk - 1) / kChunk) {
    const int64_t rows = rounded_rows();
    out = aligned(t.scratch);
    query = reinterpret_cast<Query*>(out + rows * width());
    sums = out + 2 * rows * width();
    weights = sums + rows * Vec::kLanes;
    k_scale = weights + kMostRows * kKeyBlock;
    v_scale = k_scale + kKeyBlock;
    word_weights = reinterpret_cast<Query*>(v_scale + kKeyBlock);
    score_factor = v_scale + (1 + kMostRows) * kKeyBlock;
  }

  int64_t width() const { return (kAllChunks != 0 ? kAllChunks : chunks) * kChunk; }
  int64_t rounded_rows() const { return (task.rows + kMostRows - 1) / kMostRows * kMostRows; }

  // Elements of a row that lie in chunk `c` of [padded_dim].
  int64_t padded_left(int64_t c) const { return task.padded_dim - c * kChunk; }

  // A row [padded_dim] in whole chunks, in natural order.
  const float* whole_chunks(const float* row, float* copy) const {
    if (padded_left(chunks) >= 0) return row;
    for (int64_t i = 0; i < width(); ++i) copy[i] = i < task.padded_dim ? row[i] : 0.0f;
    return copy;
  }
  void load_out(const float* row, float* chunked) const {
    for (int64_t c = 0; c < chunks; ++c) {
      Vec a, b;
      if (padded_left(c) >= kChunk) {
        a = Vec::load(row + c * kChunk);
        b = Vec::load(row + c * kChunk + Vec::kLanes);
      } else {
        load_chunk_partial<Vec, F32>(row + c * kChunk, padded_left(c), a, b);
      }
      if constexpr (Element::kSplitsPairs) deinterleave(a, b, a, b);
      a.store(chunked + c * kChunk);
      b.store(chunked + c * kChunk + Vec::kLanes);
    }
  }
  void store_out(const float* chunked, float* row) const {
    for (int64_t c = 0; c < chunks; ++c) {
      Vec a = Vec::load(chunked + c * kChunk);
      Vec b = Vec::load(chunked + c * kChunk + Vec::kLanes);
      if constexpr (Element::kSplitsPairs) interleave(a, b, a, b);
      const int64_t left = padded_left(c);
      if (left >= Vec::kLanes) a.store(row + c * kChunk);
      if (left >= kChunk) b.store(row + c * kChunk + Vec::kLanes);
      if (left < Vec::kLanes) store_partial<Vec, F32>(a, row + c * kChunk, left);
    }
  }

  // Chunk `c` of a row.
  template <class By>
  [[gnu::always_inline]] typename By::Operand load_chunk_at(const Storage* row, int64_t c) const {
    if (kAllChunks != 0 || (c + 1) * kChunk <= head_dim) return By::load(row + c * kChunk);
    Storage lanes[128 / sizeof(Storage)];
    copy_chunk<Vec>(row + c * kChunk, head_dim - c * kChunk, lanes);
    return By::load(lanes);
  }

  // Whether each cache row is read once, so that it need not stay in the outer caches: memory then
  // gives up to an eighth more.
  bool reads_once() const { return task.rows <= kMostRows; }

  // Fetches the cache lines that begin in chunk `c` of a row.
  [[gnu::always_inline]] static void prefetch_chunk(const Storage* row, int64_t c, bool once) {
    constexpr int64_t kBytes = kChunk * static_cast<int64_t>(sizeof(Storage));
    const auto* bytes = reinterpret_cast<const char*>(row) + c * kBytes;
    if (kBytes >= 64 || c % (64 / kBytes) == 0) {
      for (int64_t i = 0; i < kBytes; i += 64) {
        if (once) {
          __builtin_prefetch(bytes + i, 0, 0);
        } else {
          __builtin_prefetch(bytes + i, 0, 3);
        }
      }
    }
  }

  // What a step of kKeys keys, from j on, of the pass from chunk `c` on fetches: whole rows in the
  // order of memory, all of a block in kPasses passes of kChunks chunks.
  template <int kKeys, int kChunks, int kPasses>
  [[gnu::always_inline]] void prefetch_rows(const Storage* ahead, int64_t stride, int64_t c,
                                            int64_t j, bool once) const {
    if (kAllChunks == 0 && c > 0) return;
    const int64_t row = (c / kChunks * kKeyBlock + j) / kPasses;
    unrolled<(kKeys + kPasses - 1) / kPasses>([&](int i) __attribute__((always_inline)) {
      each_chunk([&](int64_t c) __attribute__((always_inline)) {
        prefetch_chunk(ahead + (row + i) * stride, c, once);
      });
    });
  }

  template <class Body>
  [[gnu::always_inline]] void each_chunk(const Body& body) const {
    if constexpr (kAllChunks != 0) {
      unrolled<kAllChunks>(body);
    } else {
      for (int64_t c = 0; c < chunks; ++c) body(c);
    }
  }

  // body(chunks in a pass, first chunk), passes as wide as registers allow.
  template <int kRows, class Body>
  [[gnu::always_inline]] void each_pass(const Body& body) const {
    // Accumulators: half of 16 registers, three quarters of 32.
    constexpr int kMost = (Vec::kLanes == 16 ? 24 : 8) / (2 * kRows);
    // Without a number of chunks known here passes are many, and the first fetches what is ahead.
    constexpr int kPasses = kAllChunks == 0 ? 1 : (kAllChunks + kMost - 1) / kMost;
    constexpr int kEach = kAllChunks == 0 ? 1 : (kAllChunks + kPasses - 1) / kPasses;
    int64_t c = 0;
    for (; c + kEach <= chunks; c += kEach) body(Count<kEach>{}, Count<kPasses>{}, c);
    if constexpr (kAllChunks % kEach != 0) {
      body(Count<kAllChunks % kEach>{}, Count<kPasses>{}, c);
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
};

}  // namespace
}  // namespace fasttps::cpu
