// Included after attention.h. How rope_attention_decode multiplies: chunks of 2 kLanes elements of
// a cache row, as they come from memory, with a row of the query that was prepared for them.
namespace fasttps::cpu {
namespace {

template <int kCount>
struct Count {
  static constexpr int kValue = kCount;
};

// As f32. The query lies in chunks as load_chunk delivers them.
template <class Vec, class Element>
struct FloatProduct {
  static constexpr bool kWords = false;
  using Sum = Vec;
  using Query = float;
  struct Operand {
    Vec a, b;
  };

  static Operand load(const typename Element::Storage* p) {
    Operand x;
    load_chunk<Vec, Element>(p, x.a, x.b);
    return x;
  }
  static Operand load_query(const float* p) { return {Vec::load(p), Vec::load(p + Vec::kLanes)}; }
  static Vec zero() { return Vec::set(0.0f); }
  static Vec add(Vec sum, Operand k, Operand q) { return fmadd(q.b, k.b, fmadd(q.a, k.a, sum)); }
  static Vec as_float(Vec sum) { return sum; }

  // A row of the query in natural order, zero up to whole chunks; returns the factor of its scores.
  static float prepare(const AttentionTask&, const float* row, int64_t chunks, float* query) {
    for (int64_t c = 0; c < chunks; ++c, row += 2 * Vec::kLanes, query += 2 * Vec::kLanes) {
      Vec a = Vec::load(row), b = Vec::load(row + Vec::kLanes);
      if constexpr (Element::kSplitsPairs) deinterleave(a, b, a, b);
      a.store(query);
      b.store(query + Vec::kLanes);
    }
    return 1.0f;
  }
};

// int8 caches as pairs of 16-bit integers; query and weights are fixed-point numbers of 16 bits,
// with one scale a row and a block. A score is exact in 32 bits up to head_dim kMostHeadDim.
template <class Vec>
struct Int16Product {
  static constexpr bool kWords = true;
  static constexpr int64_t kMostHeadDim = 512;
  using Sum = typename Vec::Int;
  using Query = int16_t;
  using Operand = typename Vec::Pairs;

  static Operand load(const int8_t* p) { return Operand::widen(p); }
  static Operand load_query(const int16_t* p) {
    return Operand::load(reinterpret_cast<const uint32_t*>(p));
  }
  static Sum zero() { return Sum::set(0); }
  static Sum add(Sum sum, Operand a, Operand b) { return dot_words(sum, a, b); }
  static Vec as_float(Sum sum) { return to_float(sum); }

  static float prepare(const AttentionTask&, const float* row, int64_t chunks, int16_t* query) {
    const int64_t count = chunks * 2 * Vec::kLanes;
    Vec largest = Vec::set(0.0f), check = largest;
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      const Vec x = Vec::load(row + i);
      largest = max(abs(x), largest);
      check = fmadd(x, Vec::set(0.0f), check);
    }
    const float factor = round_to_words(row, count, reduce_max(largest), query);
    return factor + reduce_add(check);  // NaN where the row has a NaN or an infinity
  }

  static float store_weights(const float* weights, int16_t* to) {
    Vec largest = Vec::set(0.0f);
    for (int64_t j = 0; j < kKeyBlock; j += Vec::kLanes) {
      largest = max(Vec::load(weights + j), largest);
    }
    return round_to_words(weights, kKeyBlock, reduce_max(largest), to);
  }

 private:
  // Returns the scale.
  static float round_to_words(const float* x, int64_t count, float largest, int16_t* to) {
    const float inverse = 32767.0f / largest;
    const bool zero = !(inverse < 1e38f);
    const Vec times = Vec::set(zero ? 0.0f : inverse);
    for (int64_t i = 0; i < count; i += Vec::kLanes) (Vec::load(x + i) * times).store_i16(to + i);
    return zero ? 0.0f : largest * (1.0f / 32767.0f);
  }
};

}  // namespace
}  // namespace fasttps::cpu
