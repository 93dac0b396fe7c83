#pragma once
#include "vector.hpp"

// The part of the AIE API that the kernels of csrc/npu/kernels use, for the host. __AIE_ARCH__ is
// 20 for AIE2 (XDNA) and 21 for AIE2P (XDNA 2). Peano compiles the same kernels against AMD's.
#ifndef __AIE_ARCH__
#define __AIE_ARCH__ 21
#endif

namespace aie {

// 1 / x, by a table and Newton's steps on the core: to float32's precision.
inline float inv(float x) { return 1.0f / x; }
template <unsigned N>
vector<float, N> inv(vector<float, N> x) {
  for (unsigned i = 0; i < N; ++i) x.lanes[i] = 1.0f / x.lanes[i];
  return x;
}
inline float invsqrt(float x) { return 1.0f / std::sqrt(x); }

// To the nearest integer, halves to even; NaN to 0. And back.
template <unsigned N>
vector<int32_t, N> to_fixed(const vector<float, N>& x) {
  vector<int32_t, N> out;
  for (unsigned i = 0; i < N; ++i) {
    const float whole = std::nearbyint(x.lanes[i]);
    out.lanes[i] = whole == whole ? static_cast<int32_t>(whole) : 0;
  }
  return out;
}
template <unsigned N>
vector<float, N> to_float(const vector<int32_t, N>& x) {
  vector<float, N> out;
  for (unsigned i = 0; i < N; ++i) out.lanes[i] = static_cast<float>(x.lanes[i]);
  return out;
}
template <unsigned N>
vector<int32_t, N> upshift(vector<int32_t, N> x, unsigned bits) {
  for (unsigned i = 0; i < N; ++i) {
    x.lanes[i] = static_cast<int32_t>(static_cast<uint32_t>(x.lanes[i]) << bits);
  }
  return x;
}
template <unsigned N>
vector<int32_t, N> add(vector<int32_t, N> a, const vector<int32_t, N>& b) {
  for (unsigned i = 0; i < N; ++i) a.lanes[i] += b.lanes[i];
  return a;
}

// 4-bit lanes as bytes; of each byte in memory the low half is the first.
template <unsigned N>
vector<uint8_t, N> unpack(const vector<uint4, N>& x) {
  vector<uint8_t, N> out;
  for (unsigned i = 0; i < N / 2; ++i) {
    out.lanes[2 * i] = x.pairs[i] & 15;
    out.lanes[2 * i + 1] = x.pairs[i] >> 4;
  }
  return out;
}
template <unsigned N>
vector<int8_t, N> sub(vector<int8_t, N> a, const vector<int8_t, N>& b) {
  for (unsigned i = 0; i < N; ++i) a.lanes[i] = static_cast<int8_t>(a.lanes[i] - b.lanes[i]);
  return a;
}
// 8 bits are exact in bfloat16.
template <class T, unsigned N>
vector<T, N> to_float(const vector<int8_t, N>& x) {
  vector<T, N> out;
  for (unsigned i = 0; i < N; ++i) out.lanes[i] = T(static_cast<float>(x.lanes[i]));
  return out;
}

}  // namespace aie
