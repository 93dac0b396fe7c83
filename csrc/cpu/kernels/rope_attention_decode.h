// Included after decode_rows.h. Few query rows: every cache row is read once for all of them,
// four at a time. A score is a dot product along head_dim; the partial sums of kLanes scores are
// added up together (sum_each). While the keys of a block are read its values are fetched, and
// while these are read the keys of the next block are, in the order of memory.
namespace fasttps::cpu {
namespace {

template <class Vec, class Element, class Product, int64_t kHeadDim>
struct Decode : DecodeRows<Vec, Element, Product, kHeadDim> {
  using Rows = DecodeRows<Vec, Element, Product, kHeadDim>;
  using Storage = typename Element::Storage;
  using Query = typename Product::Query;
  using Operand = typename Product::Operand;
  using Floats = FloatProduct<Vec, Element>;
  using Rows::kAllChunks;
  using Rows::kChunk;
  using Rows::kMostRows;
  using Rows::kWords;
  using Rows::task;

  using Rows::chunks;
  using Rows::each_chunk;
  using Rows::factors;
  using Rows::k_scale;
  using Rows::load_out;
  using Rows::out;
  using Rows::prefetch_chunk;
  using Rows::query;
  using Rows::reads_once;
  using Rows::rounded_rows;
  using Rows::score_factor;
  using Rows::store_out;
  using Rows::sums;
  using Rows::v_scale;
  using Rows::weights;
  using Rows::whole_chunks;
  using Rows::width;
  using Rows::word_weights;

  explicit Decode(const AttentionTask& task) : Rows(task) {}

  // Up to kMostRows rows at a block.
  struct Item {
    KeyBlock block;
    int64_t row;
    float rescale[kMostRows];  // of what was accumulated before
    bool as_words;             // whether weights are words
    float factor[kMostRows];   // then: of the values
  };

  // weights[r, j] = query_r . k_j for kRows rows and the keys of a block; beyond them, anything.
  template <int kRows>
  [[gnu::always_inline]] void scores(const KeyBlock& block, int64_t row) const {
    constexpr int kKeys = static_cast<int>(Vec::kLanes) / kRows;
    const bool once = reads_once();
    const Query* q = query + row * width();
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
      typename Product::Sum dot[kRows * kKeys];
      for (auto& x : dot) x = Product::zero();
      // Key by key, so that both caches are asked for in the order of memory.
      unrolled<kKeys>([&](int i) __attribute__((always_inline)) {
        each_chunk([&](int64_t c) __attribute__((always_inline)) {
          const Operand key = Rows::template load_chunk_at<Product>(k + offset[i], c);
          prefetch_chunk(v + i * v_stride, c, once);
          unrolled<kRows>([&](int r) __attribute__((always_inline)) {
            dot[r * kKeys + i] = Product::add(dot[r * kKeys + i], key,
                                              Product::load_query(q + r * width() + c * kChunk));
          });
        });
      });
      const Vec sum = Product::as_float(sum_each(dot));
      if constexpr (kRows == 1) {
        sum.store(weights + j);
      } else {
        store_parts<kRows>(sum, weights + j, kKeyBlock);
      }
    }
  }

  // Scores of one row in base 2, with soft cap and limits: what few calls have, and last blocks.
  [[gnu::noinline]] void limit_scores(const KeyBlock& block, int64_t row, float* w,
                                      const float* k_factor) const {
    const Vec row_factor = Vec::set(kWords ? score_factor[row] : 1.0f);
    for (int64_t at = 0; at < kKeyBlock; at += Vec::kLanes) {
      Vec score = Vec::load(w + at);
      if constexpr (kWords) score = score * row_factor;
      if constexpr (Element::kScaled) score = score * Vec::load(k_factor + at);
      if (task.softcap_log2 > 0.0f) score = Vec::set(task.softcap_log2) * tanh(score);
      const auto bits = static_cast<uint32_t>(block.allowed[row] >> at);
      select_bits(bits, score, Vec::set(kMinusInf)).store(w + at);
    }
  }

  // Turns the scores of kRows rows into weights 2^(score - max), times the scale of their value
  // row; updates max and sums.
  template <int kRows, bool kLimited>
  [[gnu::always_inline]] void softmax(Item& item, int64_t r0, const float* k_factor,
                                      const float* v_factor) const {
    constexpr int kVecs = static_cast<int>(kKeyBlock / Vec::kLanes);
    constexpr int kUnrolled = kVecs > 8 ? 1 : kVecs;  // scores that are kept in registers
    constexpr bool kFactors = !kLimited && (kWords || Element::kScaled);
    const int64_t row = item.row + r0;
    float* w = weights + r0 * kKeyBlock;
    Vec largest[kRows], sum[kRows], shift[kRows];
    unrolled<kRows>([&](int r) __attribute__((always_inline)) {
      if constexpr (kLimited) limit_scores(item.block, row + r, w + r * kKeyBlock, k_factor);
      largest[r] = Vec::set(task.max[row + r]);
      sum[r] = Vec::set(0.0f);
      const Vec row_factor = Vec::set(kFactors && kWords ? score_factor[row + r] : 1.0f);
      for (int begin = 0; begin < kVecs; begin += kUnrolled) {
        unrolled<kUnrolled>([&](int i) __attribute__((always_inline)) {
          const int64_t at = (begin + i) * Vec::kLanes;
          Vec score = Vec::load(w + r * kKeyBlock + at);
          if constexpr (kFactors && kWords) score = score * row_factor;
          if constexpr (kFactors && Element::kScaled) score = score * Vec::load(k_factor + at);
          if constexpr (kFactors) score.store(w + r * kKeyBlock + at);
          largest[r] = max(score, largest[r]);
        });
      }
    });
    float new_max[kRows];
    unrolled<kRows>([&](int r) __attribute__((always_inline)) {
      new_max[r] = reduce_max(largest[r]);
      shift[r] = Vec::set(finite_max(new_max[r]));
    });
    for (int begin = 0; begin < kVecs; begin += kUnrolled) {
      unrolled<kUnrolled>([&](int i) __attribute__((always_inline)) {
        const int64_t at = (begin + i) * Vec::kLanes;
        unrolled<kRows>([&](int r) __attribute__((always_inline)) {
          float* lanes = w + r * kKeyBlock + at;
          Vec weight = exp2(Vec::load(lanes) - shift[r]);
          sum[r] = sum[r] + weight;
          if constexpr (Element::kScaled) weight = weight * Vec::load(v_factor + at);
          weight.store(lanes);
        });
      });
    }
    unrolled<kRows>([&](int r) __attribute__((always_inline)) {
      const Vec before = exp2(Vec::set(task.max[row + r]) - shift[r]);
      item.rescale[r0 + r] = first_lane(before);
      float* sum_lanes = sums + (row + r) * Vec::kLanes;
      fmadd(Vec::load(sum_lanes), before, sum[r]).store(sum_lanes);
      task.max[row + r] = new_max[r];
    });
    if constexpr (kWords) {
      if (!item.as_words) return;
      unrolled<kRows>([&](int r) __attribute__((always_inline)) {
        item.factor[r0 + r] =
            Product::store_weights(w + r * kKeyBlock, word_weights + (r0 + r) * kKeyBlock);
      });
    }
  }

  // Values are multiplied as words where all rows see all positions and every factor is finite.
  bool can_use_words(const KeyBlock& block, const float* v_factor) const {
    if (!kWords || block.partial) return false;
    if constexpr (Element::kScaled) {
      Vec check = Vec::set(0.0f);
      for (int64_t j = 0; j < kKeyBlock; j += Vec::kLanes) {
        check = fmadd(Vec::load(v_factor + j), Vec::set(0.0f), check);
      }
      return reduce_add(check) == 0.0f;
    }
    return true;
  }

  template <int kRows>
  void weigh(Item& item) const {
    const float* k_factor = factors(task.k_scale, task.k_scale_stride, item.block, k_scale);
    const float* v_factor = factors(task.v_scale, task.v_scale_stride, item.block, v_scale);
    item.as_words = can_use_words(item.block, v_factor);
    for (int64_t r = 0; r < kRows; ++r) item.rescale[r] = item.factor[r] = 1.0f;
    const bool limited =
        task.softcap_log2 > 0.0f || item.block.count != kKeyBlock || item.block.partial;
    const int64_t inside = task.rows - item.row;  // a row beyond is computed and never read
    if constexpr (Vec::kLanes == 16) {
      if (!limited && inside >= kRows) return softmax<kRows, false>(item, 0, k_factor, v_factor);
      if (kRows == 4 && !limited) return softmax<3, false>(item, 0, k_factor, v_factor);
    }
    for (int64_t r = 0; r < kRows && r < inside; ++r) {
      if (limited) {
        softmax<1, true>(item, r, k_factor, v_factor);
      } else {
        softmax<1, false>(item, r, k_factor, v_factor);
      }
    }
  }

  // out_r = out_r * rescale_r + sum_j w[r, j] v_j for kRows rows and kChunks chunks from `c` on.
  // The weight of a position that no row may see is 0; with kExcluded the positions whose bit is 0
  // are left out, so that whatever lies there does not matter.
  template <int kRows, int kChunks, int kPasses, bool kExcluded>
  [[gnu::always_inline]] void values_at(const KeyBlock& block, uint64_t bits, int64_t row,
                                        int64_t c, const float* w, const float* rescale,
                                        const Storage* ahead, int64_t ahead_stride) const {
    const bool once = reads_once();
    Vec total[kRows][2 * kChunks];
    for (auto& of_row : total) {
      for (Vec& x : of_row) x = Vec::set(0.0f);
    }
    const Storage* v = value_row<Element>(task, block.position);
    const int64_t v_stride = task.v_stride;
    if (kAllChunks != 0) v += c * kChunk;
    for (int64_t j = 0; j < block.count; ++j, v += v_stride) {
      if (kExcluded && (bits >> j & 1) == 0) continue;
      Vec value[2 * kChunks];
      unrolled<kChunks>([&](int i) __attribute__((always_inline)) {
        const auto x = Rows::template load_chunk_at<Floats>(v, kAllChunks != 0 ? i : c + i);
        value[2 * i] = x.a;
        value[2 * i + 1] = x.b;
      });
      if (j % kPasses == 0)
        Rows::template prefetch_rows<1, kChunks, kPasses>(ahead, ahead_stride, c, j, once);
      unrolled<kRows>([&](int r) __attribute__((always_inline)) {
        const Vec weight = Vec::set(w[r * kKeyBlock + j]);
        unrolled<2 * kChunks>([&](int i) __attribute__((always_inline)) {
          total[r][i] = fmadd(weight, value[i], total[r][i]);
        });
      });
    }
    unrolled<kRows>([&](int r) __attribute__((always_inline)) {
      const Vec before = Vec::set(rescale[r]);
      unrolled<2 * kChunks>([&](int i) __attribute__((always_inline)) {
        float* to = out + (row + r) * width() + c * kChunk + i * Vec::kLanes;
        fmadd(Vec::load(to), before, total[r][i]).store(to);
      });
    });
  }

  // The same with word_weights and all positions, two of which are a pair.
  template <int kRows, int kChunks, int kPasses>
  [[gnu::always_inline]] void word_values_at(const Item& item, int64_t c, const Storage* ahead,
                                             int64_t ahead_stride) const {
    const bool once = reads_once();
    typename Product::Sum total[kRows][2 * kChunks];
    for (auto& of_row : total) {
      for (auto& x : of_row) x = Product::zero();
    }
    const Storage* v = value_row<Element>(task, item.block.position);
    const int64_t v_stride = task.v_stride;
    if (kAllChunks != 0) v += c * kChunk;
    const auto add_pair = [&](int64_t j, bool single) __attribute__((always_inline)) {
      Operand first[kChunks], second[kChunks], pairs[2 * kChunks];
      unrolled<kChunks>([&](int i) __attribute__((always_inline)) {
        first[i] = Rows::template load_chunk_at<Product>(v, kAllChunks != 0 ? i : c + i);
      });
      unrolled<kChunks>([&](int i) __attribute__((always_inline)) {
        second[i] = single ? Operand::set(0)
                           : Rows::template load_chunk_at<Product>(v + v_stride,
                                                                   kAllChunks != 0 ? i : c + i);
      });
      unrolled<kChunks>([&](int i) __attribute__((always_inline)) {
        pair_words(first[i], second[i], pairs[2 * i], pairs[2 * i + 1]);
      });
      Rows::template prefetch_rows<2, kChunks, kPasses>(ahead, ahead_stride, c, j, once);
      unrolled<kRows>([&](int r) __attribute__((always_inline)) {
        uint32_t both;
        __builtin_memcpy(&both, word_weights + r * kKeyBlock + j, sizeof both);
        const Operand weight = Operand::set(both);
        unrolled<2 * kChunks>([&](int i) __attribute__((always_inline)) {
          total[r][i] = Product::add(total[r][i], pairs[i], weight);
        });
      });
    };
    int64_t j = 0;
    for (; j + 2 <= item.block.count; j += 2, v += 2 * v_stride) {
      add_pair(j, false);
    }
    if (j < item.block.count) add_pair(j, true);
    unrolled<kRows>([&](int r) __attribute__((always_inline)) {
      const Vec before = Vec::set(item.rescale[r]), factor = Vec::set(item.factor[r]);
      unrolled<kChunks>([&](int i) __attribute__((always_inline)) {
        Vec a, b;
        restore_order(Product::as_float(total[r][2 * i]), Product::as_float(total[r][2 * i + 1]), a,
                      b);
        float* to = out + (item.row + r) * width() + (c + i) * kChunk;
        fmadd(Vec::load(to), before, a * factor).store(to);
        fmadd(Vec::load(to + Vec::kLanes), before, b * factor).store(to + Vec::kLanes);
      });
    });
  }

  template <int kRows, bool kExcluded>
  [[gnu::noinline]] void values(const KeyBlock& block, uint64_t bits, int64_t row, const float* w,
                                const float* rescale, const Storage* ahead,
                                int64_t ahead_stride) const {
    Rows::template each_pass<kRows>([&](auto count, auto passes, int64_t c)
                                        __attribute__((always_inline)) {
                                          values_at<kRows, count.kValue, passes.kValue, kExcluded>(
                                              block, bits, row, c, w, rescale, ahead, ahead_stride);
                                        });
  }
  template <int kRows>
  [[gnu::noinline]] void word_values(const Item& item, const Storage* ahead,
                                     int64_t ahead_stride) const {
    Rows::template each_pass<kRows>(
        [&](auto count, auto passes, int64_t c) __attribute__((always_inline)) {
          word_values_at<kRows, count.kValue, passes.kValue>(item, c, ahead, ahead_stride);
        });
  }

  template <int kRows>
  void accumulate(const Item& item) const {
    const KeyBlock& block = item.block;
    const bool more = block.position + 2 * kKeyBlock <= task.end;
    const Storage* ahead = more ? key_row<Element>(task, block.position + kKeyBlock)
                                : value_row<Element>(task, block.position);
    const int64_t stride = more ? task.k_stride : task.v_stride;
    if constexpr (kWords) {
      if (item.as_words) return word_values<kRows>(item, ahead, stride);
    }
    const float* w = weights;
    if (!block.partial) {
      values<kRows, false>(block, block.all, item.row, w, item.rescale, ahead, stride);
    } else if (block.alike) {
      values<kRows, true>(block, block.seen, item.row, w, item.rescale, ahead, stride);
    } else {
      for (int r = 0; r < kRows && item.row + r < task.rows; ++r) {
        values<1, true>(block, block.allowed[item.row + r], item.row + r, w + r * kKeyBlock,
                        item.rescale + r, ahead, stride);
      }
    }
  }

  template <int kRows>
  [[gnu::noinline]] void attend(Item& item) const {
    scores<kRows>(item.block, item.row);
    weigh<kRows>(item);
    accumulate<kRows>(item);
  }

  void run() const {
    for (int64_t r = 0; r < task.rows; ++r) {
      const float* row = whole_chunks(task.query + r * task.padded_dim, out + r * width());
      const float factor = Product::prepare(task, row, chunks, query + r * width());
      if constexpr (kWords) score_factor[r] = factor;
      load_out(task.out + r * task.padded_dim, out + r * width());
      for (int64_t i = 0; i < Vec::kLanes; ++i) sums[r * Vec::kLanes + i] = 0.0f;
      sums[r * Vec::kLanes] = task.sum[r];
    }
    for (int64_t i = task.rows * width(); i < rounded_rows() * width(); ++i) {
      out[i] = 0.0f;
      query[i] = 0;
    }
    if constexpr (kWords) {
      for (int64_t i = 0; i < kMostRows * kKeyBlock; ++i) word_weights[i] = 0;
    }
    Item item;
    for (int64_t position = task.begin; position < task.end; position += kKeyBlock) {
      item.block = key_block(task, position);
      if (!item.block.any) continue;
      for (item.row = 0; item.row < task.rows;) {
        const int64_t left = task.rows - item.row;
        if constexpr (kMostRows == 4) {
          if (left > 2) {
            attend<4>(item);
            item.row += 4;
            continue;
          }
          if (left == 2) {
            attend<2>(item);
            item.row += 2;
            continue;
          }
        }
        attend<1>(item);
        item.row += 1;
      }
    }
    for (int64_t r = 0; r < task.rows; ++r) {
      store_out(out + r * width(), task.out + r * task.padded_dim);
      task.sum[r] = reduce_add(Vec::load(sums + r * Vec::kLanes));
    }
  }
};

template <class Vec, class Element, class Product>
void decode_by(const AttentionTask& task) {
  if constexpr (Vec::kLanes > 1) {
    switch (task.head_dim) {
      case 64:
        return Decode<Vec, Element, Product, 64>(task).run();
      case 96:
        return Decode<Vec, Element, Product, 96>(task).run();
      case 128:
        return Decode<Vec, Element, Product, 128>(task).run();
    }
  }
  Decode<Vec, Element, Product, 0>(task).run();
}

// See AttentionTask.
template <class Vec, class Element>
void rope_attention_decode(const AttentionTask& task) {
  if constexpr (Vec::kBf16Dot && Element::kScaled) {
    if (task.bf16_factor > 0.0f && task.head_dim <= Int16Product<Vec>::kMostHeadDim) {
      return decode_by<Vec, Element, Int16Product<Vec>>(task);
    }
  }
  decode_by<Vec, Element, FloatProduct<Vec, Element>>(task);
}

}  // namespace
}  // namespace fasttps::cpu
