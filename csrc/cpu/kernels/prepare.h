// Included after Vec and element.h. One token as a dot product wants it (KernelTable::prepare).
namespace fasttps::cpu {
namespace {

inline constexpr int64_t kRunCols = 32;  // columns that share a scale in int8

template <class Vec, class Element>
void prepare_f32(const void* x, int64_t cols, int64_t cols_padded, void* activation) {
  auto* to = static_cast<float*>(activation);
  load_row<Vec, Element>(x, to, cols);
  for (int64_t i = cols; i < cols_padded; ++i) to[i] = 0.0f;
}

template <class Element>
inline constexpr bool kIsBf16 = false;
template <>
inline constexpr bool kIsBf16<Bf16> = true;

template <class Vec, class Element>
void prepare_bf16(const void* x, int64_t cols, int64_t cols_padded, void* activation) {
  const auto* from = static_cast<const typename Element::Storage*>(x);
  auto* to = static_cast<uint16_t*>(activation);
  int64_t i = 0;
  if constexpr (kIsBf16<Element>) {
    __builtin_memcpy(to, from, static_cast<uint64_t>(cols) * 2);
    i = cols;
  }
  for (; i + Vec::kLanes <= cols; i += Vec::kLanes) {
    Element::template load<Vec>(from + i).store_bf16(to + i);
  }
  if (i < cols) {
    store_partial<Vec, Bf16>(load_partial<Vec, Element>(from + i, cols - i), to + i, cols - i);
  }
  for (i = cols; i < cols_padded; ++i) to[i] = 0;
}

// 32 columns of a token in int8: x = scale * q, scale = max |x| / 127. Unsigned quants of weights
// are q + offset, which costs -offset * (sum of q) in the start of an integer sum.
struct Int8Run {
  int8_t q[32];
  float scale;  // NaN if a column is NaN or infinite
  float sum;    // scale * (sum of q)
  int32_t minus_128_sum;
  int32_t minus_8_sum;
  int32_t minus_32_sum[2];  // of 16 columns each
  int32_t unused[2];

  template <int kOffset>
  int32_t start(int sub_block) const {
    if constexpr (kOffset == 128) return minus_128_sum;
    if constexpr (kOffset == 8) return minus_8_sum;
    if constexpr (kOffset == 32) return minus_32_sum[sub_block];
    return 0;
  }
  int32_t quad(int j) const {
    int32_t columns;
    __builtin_memcpy(&columns, q + 4 * j, 4);
    return columns;
  }
};
static_assert(sizeof(Int8Run) == 64);

template <class Vec>
inline void quantize_run(const float* x, Int8Run& run) {
  Vec largest = Vec::set(0.0f), not_finite = Vec::set(0.0f);
  for (int64_t i = 0; i < kRunCols; i += Vec::kLanes) {
    const Vec v = Vec::load(x + i);
    largest = max(largest, abs(v));
    not_finite = not_finite + v * Vec::set(0.0f);  // NaN once an element is NaN or infinite
  }
  const bool finite = reduce_add(not_finite) == 0.0f;
  run.scale = finite ? reduce_max(largest) / 127.0f : __builtin_nanf("");
  const bool zero = !(run.scale > 0.0f);
  const Vec scale = Vec::set(zero ? 1.0f : run.scale), keep = Vec::set(zero ? 0.0f : 1.0f);
  // A subnormal scale is too coarse to keep x / scale within 127 by itself.
  const Vec most = Vec::set(127.0f), least = Vec::set(-127.0f);
  int32_t sums[2];
  for (int half = 0; half < 2; ++half) {
    for (int64_t i = 16 * half; i < 16 * half + 16; i += Vec::kLanes) {
      const Vec q = rint(max(least, min(most, Vec::load(x + i) / scale)));
      const Vec kept = finite ? q * keep : Vec::set(0.0f);
      kept.store_i8(run.q + i);
    }
    sums[half] = sum_of_16(run.q + 16 * half);
    run.minus_32_sum[half] = -32 * sums[half];
  }
  const int32_t sum = sums[0] + sums[1];
  run.sum = run.scale * static_cast<float>(sum);
  run.minus_128_sum = -128 * sum;
  run.minus_8_sum = -8 * sum;
  run.unused[0] = run.unused[1] = 0;
}

template <class Vec, class Element>
void prepare_int8(const void* x, int64_t cols, int64_t cols_padded, void* activation) {
  const auto* from = static_cast<const typename Element::Storage*>(x);
  auto* run = static_cast<Int8Run*>(activation);
  for (int64_t col = 0; col < cols_padded; col += kRunCols, ++run) {
    float columns[kRunCols] = {};
    const int64_t left = cols - col;
    if (left > 0) load_row<Vec, Element>(from + col, columns, left < kRunCols ? left : kRunCols);
    quantize_run<Vec>(columns, *run);
  }
}

}  // namespace
}  // namespace fasttps::cpu
