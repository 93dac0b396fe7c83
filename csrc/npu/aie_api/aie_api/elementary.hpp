#pragma once
#include "vector.hpp"

namespace aie {

// What the host takes AIE2P's exp2 instruction for: 2^x rounded to bf16, or a line between powers
// of two, 2^n (1 + f), which is up to 6.2 % too large: the error that has been reported of it.
enum class host_exp2 { rounded, linear };
inline thread_local host_exp2 current_exp2 = host_exp2::rounded;

}  // namespace aie

namespace aie::inline AIE_HOST_CORE {

#if __AIE_ARCH__ >= 21
template <class T, unsigned N>
vector<T, N> exp2(const vector<float, N>& v) {
  static_assert(std::is_same_v<T, bfloat16>);
  vector<T, N> out;
  for (unsigned i = 0; i < N; ++i) {
    const float x = v.lanes[i], n = std::floor(x);
    out.lanes[i] = current_exp2 == host_exp2::rounded || !std::isfinite(x) || std::fabs(n) > 1000
                       ? std::exp2(x)
                       : std::ldexp(1 + (x - n), static_cast<int>(n));
  }
  return out;
}
#endif

// To the nearest; NaN gives 0.
template <class T, unsigned N>
vector<T, N> to_fixed(const vector<float, N>& v) {
  vector<T, N> out;
  for (unsigned i = 0; i < N; ++i)
    out.lanes[i] = v.lanes[i] == v.lanes[i] ? static_cast<T>(std::nearbyint(v.lanes[i])) : T(0);
  return out;
}
template <class T, class From, unsigned N>
vector<T, N> to_float(const vector<From, N>& v) {
  vector<T, N> out;
  for (unsigned i = 0; i < N; ++i) {
    const float x = static_cast<float>(v.lanes[i]);
    // Integers of 8 bits fit bf16: no rounding, and a shift that vectorises.
    if constexpr (std::is_same_v<T, bfloat16> && sizeof(From) <= 2)
      out.lanes[i].bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
    else
      out.lanes[i] = static_cast<T>(x);
  }
  return out;
}
inline float inv(float x) { return 1 / x; }
template <unsigned N>
vector<float, N> inv(vector<float, N> v) {
  for (float& x : v.lanes) x = 1 / x;
  return v;
}

}  // namespace aie::inline AIE_HOST_CORE
