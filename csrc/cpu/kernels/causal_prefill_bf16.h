// Included after causal_prefill.h. The same with vdpbf16ps: a step of a product adds two elements,
// as pairs of bf16. Pairs of a key lie along head_dim as the cache has them; of values, one pair is
// the same element of two keys. Query and weights are rounded to bf16.
namespace fasttps::cpu {
namespace {

template <class Vec, class Element>
struct PairProduct {
  using Word = uint32_t;
  using Operand = typename Vec::Pairs;
  static constexpr bool kInPlace = !Element::kScaled;
  static Operand load(const uint32_t* p) { return Operand::load(p); }
  static Operand broadcast(const char* p) {
    uint32_t x;
    __builtin_memcpy(&x, p, sizeof x);
    return Operand::set(x);
  }
  static Vec add(Vec acc, Operand a, Operand b) { return dot_pairs(acc, a, b); }

  const AttentionTask& task;
  const PrefillState<Vec>& s;
  const int64_t pairs;  // of a row, zeros past head_dim
  uint32_t* query;      // [padded_dim / 2][stride]
  uint32_t* weights;    // [kKeyBlock / 2][stride]
  uint32_t* value;      // [kKeyBlock / 2][padded_dim]
  uint16_t* key;        // [kKeyBlock][padded_dim], where the cache does not serve

  PairProduct(const AttentionTask& t, const PrefillState<Vec>& state)
      : task(t), s(state), pairs((t.head_dim + 1) / 2) {
    auto* words = reinterpret_cast<uint32_t*>(s.rest);
    query = words;
    weights = query + s.stride * t.padded_dim / 2;
    value = weights + kKeyBlock / 2 * s.stride;
    key = reinterpret_cast<uint16_t*>(value + kKeyBlock / 2 * t.padded_dim);
    const Vec times = Vec::set(1.0f / t.bf16_factor);
    auto* lanes = reinterpret_cast<float*>(key);  // kLanes rows of bf16
    const int64_t row_words = (t.padded_dim / 2 + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes;
    for (int64_t r = 0; r < s.stride; r += Vec::kLanes) {
      for (int64_t i = 0; i < Vec::kLanes * row_words; ++i) lanes[i] = 0.0f;
      for (int64_t i = 0; i < Vec::kLanes && r + i < t.rows; ++i) {
        const float* row = t.query + (r + i) * t.padded_dim;
        auto* halves = reinterpret_cast<uint16_t*>(lanes + i * row_words);
        for (int64_t d = 0; d < t.padded_dim; d += Vec::kLanes) {
          (Vec::load(row + d) * times).store_bf16(halves + d);
        }
      }
      for (int64_t c = 0; c < t.padded_dim / 2; c += Vec::kLanes) {
        Vec tile[Vec::kLanes];
        for (int64_t i = 0; i < Vec::kLanes; ++i) tile[i] = Vec::load(lanes + i * row_words + c);
        transpose_lanes(tile);
        for (int64_t i = 0; i < Vec::kLanes && c + i < t.padded_dim / 2; ++i) {
          tile[i].store(reinterpret_cast<float*>(query) + (c + i) * s.stride + r);
        }
      }
    }
  }
  static float score_factor(const AttentionTask& task) { return task.bf16_factor; }

  void scores(const KeyBlock& block) const {
    const auto* k = key_row<Element>(task, block.position);
    Factors factors{reinterpret_cast<const char*>(k), task.k_stride * 2, 4};
    if (!kInPlace || task.head_dim % 2 != 0) {
      for (int64_t j = 0; j < block.count; ++j) {
        uint16_t* to = key + j * task.padded_dim;
        for (int64_t d = 0; d < task.padded_dim; d += Vec::kLanes) {
          const int64_t left = task.head_dim - d;
          (left > 0 ? load_up_to<Vec, Element>(k + j * task.k_stride + d, left) : Vec::set(0.0f))
              .store_bf16(to + d);
        }
      }
      factors = {reinterpret_cast<const char*>(key), task.padded_dim * 2, 4};
    }
    transposed_matmul<Vec, PairProduct>(factors, block.count, query, s.stride, pairs, nullptr,
                                        s.scores);
  }

  void put_weights(int64_t j, int64_t r, Vec even, Vec odd) const {
    bf16_pairs(even, odd).store(weights + j / 2 * s.stride + r);
  }
  float weight(int64_t j, int64_t r) const {
    const uint32_t pair = weights[j / 2 * s.stride + r];
    return bf16_to_f32(static_cast<uint16_t>(j % 2 == 0 ? pair : pair >> 16));
  }

  void pair_values(const KeyBlock& block) const {
    for (int64_t j = 0; j < block.count; j += 2) {
      const auto* even = value_row<Element>(task, block.position + j);
      const auto* odd = even + task.v_stride;
      uint32_t* to = value + j / 2 * task.padded_dim;
      for (int64_t d = 0; d < task.head_dim; d += Vec::kLanes) {
        const int64_t left = task.head_dim - d;
        const Vec first = load_up_to<Vec, Element>(even + d, left);
        const Vec second =
            j + 1 < block.count ? load_up_to<Vec, Element>(odd + d, left) : Vec::set(0.0f);
        exact_bf16_pairs(first, second).store(to + d);
      }
    }
  }
  void values(const KeyBlock& block) const {
    pair_values(block);
    transposed_matmul<Vec, PairProduct>(
        {reinterpret_cast<const char*>(value), 4, task.padded_dim * 4}, task.head_dim, weights,
        s.stride, (block.count + 1) / 2, s.rescale, s.out);
  }
};

// See AttentionTask. Where the table has no vdpbf16ps, or bf16_factor does not allow it, this is
// causal_prefill.
template <class Vec, class Element>
void causal_prefill_bf16(const AttentionTask& task) {
  if constexpr (Vec::kBf16Dot) {
    if (task.bf16_factor > 0.0f) return prefill_with<Vec, Element, PairProduct<Vec, Element>>(task);
  }
  causal_prefill<Vec, Element>(task);
}

}  // namespace
}  // namespace fasttps::cpu
