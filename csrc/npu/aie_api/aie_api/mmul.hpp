#pragma once
#include "vector.hpp"

namespace aie::inline AIE_HOST_CORE {

// bfp16ebs8: eight values share the largest exponent E; mantissas of 8 bits in units of 2^(E - 6),
// rounded by the mode and saturated. A block with a NaN or an infinity becomes NaN.
inline void round_to_bfp16(float* block) {
  float largest = 0;
  bool finite = true;
  for (unsigned i = 0; i < 8; ++i) {
    finite = finite && std::isfinite(block[i]);
    largest = largest < std::fabs(block[i]) ? std::fabs(block[i]) : largest;
  }
  if (finite && largest == 0) return;
  if (!finite) {
    for (unsigned i = 0; i < 8; ++i) block[i] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  // Any f32 but 0 is a normal double: its exponent is in its bits, and scaling by 2^n is exact.
  const uint64_t biased = std::bit_cast<uint64_t>(static_cast<double>(largest)) >> 52;
  const double up = std::bit_cast<double>((2 * 1023 + 6 - biased) << 52);
  const double down = std::bit_cast<double>((biased - 6) << 52);
  const bool even = current_rounding == rounding_mode::conv_even;
  constexpr double kUnits = 0x1.8p52;  // added, it leaves no bits below 1: rounds to nearest even
  for (unsigned i = 0; i < 8; ++i) {
    const double scaled = static_cast<double>(block[i]) * up;
    double mantissa = even ? (scaled + kUnits) - kUnits : round_by_mode(scaled);
    mantissa = mantissa > 127 ? 127 : mantissa < -128 ? -128 : mantissa;
    block[i] = static_cast<float>(mantissa * down);
  }
}

// C [M, N] += A [M, K] B [K, N], all row-major; along K in order, in f32.
template <unsigned M, unsigned K, unsigned N, class TA, class TB = TA>
struct mmul {
  accum<accumulator_of<TA>, M * N> c;
  using type = typename lane<accumulator_of<TA>>::type;

  explicit mmul(const vector<float, M * N>& start) : c(start) {}
  void mac(const vector<TA, M * K>& a, const vector<TB, K * N>& b) {
    type x[M * K], y[K * N];
    for (unsigned i = 0; i < M * K; ++i) x[i] = static_cast<type>(a.lanes[i]);
    for (unsigned i = 0; i < K * N; ++i) y[i] = static_cast<type>(b.lanes[i]);
#ifdef AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16
    if constexpr (std::is_same_v<TA, bfloat16> && K == 8) {
      for (unsigned i = 0; i < M; ++i) round_to_bfp16(x + 8 * i);
      for (unsigned j = 0; j < N; ++j) {
        float column[8];
        for (unsigned k = 0; k < 8; ++k) column[k] = y[k * N + j];
        round_to_bfp16(column);
        for (unsigned k = 0; k < 8; ++k) y[k * N + j] = column[k];
      }
    }
#endif
    for (unsigned i = 0; i < M; ++i) {
      type row[N];
      for (unsigned j = 0; j < N; ++j) row[j] = c.lanes[i * N + j];
      for (unsigned k = 0; k < K; ++k)
        for (unsigned j = 0; j < N; ++j) row[j] += x[i * K + k] * y[k * N + j];
      for (unsigned j = 0; j < N; ++j) c.lanes[i * N + j] = row[j];
    }
  }
  template <class T>
  vector<T, M * N> to_vector() const {
    return c.template to_vector<T>();
  }
};

}  // namespace aie::inline AIE_HOST_CORE
