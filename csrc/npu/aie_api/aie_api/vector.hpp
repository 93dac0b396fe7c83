#pragma once
#include <array>
#include <cstring>
#include <type_traits>

#include "bfloat16.hpp"

// Vectors and accumulators of the AIE API. Arrays, whose loops a host's compiler vectorises.

struct accfloat {};  // float32 sums
struct uint4 {};     // two in a byte of memory

namespace aie {

template <class T, unsigned N>
struct vector {
  using value_type = T;
  std::array<T, N> lanes{};

  static constexpr unsigned size() { return N; }
  T operator[](unsigned i) const { return lanes[i]; }
  T get(unsigned i) const { return lanes[i]; }
  void set(T x, unsigned i) { lanes[i] = x; }

  template <unsigned M>
  vector<T, M> extract(unsigned part) const {
    vector<T, M> out;
    for (unsigned i = 0; i < M; ++i) out.lanes[i] = lanes[part * M + i];
    return out;
  }
  template <unsigned M>
  vector& insert(unsigned part, const vector<T, M>& x) {
    for (unsigned i = 0; i < M; ++i) lanes[part * M + i] = x.lanes[i];
    return *this;
  }
  // The same bits as lanes of another type.
  template <class U>
  vector<U, N * sizeof(T) / sizeof(U)> cast_to() const {
    vector<U, N * sizeof(T) / sizeof(U)> out;
    std::memcpy(static_cast<void*>(out.lanes.data()), static_cast<const void*>(lanes.data()),
                sizeof(T) * N);
    return out;
  }
};

template <unsigned N>
struct vector<uint4, N> {
  std::array<uint8_t, N / 2> pairs{};
};

template <class Tag, unsigned N>
struct accum;

template <unsigned N>
struct accum<accfloat, N> {
  std::array<float, N> lanes{};

  static constexpr unsigned size() { return N; }
  accum() = default;
  template <class T>
  explicit accum(const vector<T, N>& x) {
    from_vector(x);
  }
  template <class T>
  void from_vector(const vector<T, N>& x) {
    for (unsigned i = 0; i < N; ++i) lanes[i] = static_cast<float>(x.lanes[i]);
  }
  // Rounded as the core's mode says; float32 as it is.
  template <class T>
  vector<T, N> to_vector() const {
    vector<T, N> out;
    if constexpr (std::is_same_v<T, float>) {
      out.lanes = lanes;
    } else if (get_rounding() == rounding_mode::conv_even) {
      for (unsigned i = 0; i < N; ++i) out.lanes[i].bits = detail::to_bf16_even(lanes[i]);
    } else {
      const rounding_mode mode = get_rounding();
      for (unsigned i = 0; i < N; ++i) out.lanes[i].bits = detail::to_bf16(lanes[i], mode);
    }
    return out;
  }
};

template <unsigned N, class T>
vector<std::remove_const_t<T>, N> load_v(const T* from) {
  vector<std::remove_const_t<T>, N> out;
  std::memcpy(static_cast<void*>(out.lanes.data()), static_cast<const void*>(from), sizeof(T) * N);
  return out;
}
template <unsigned N>
vector<uint4, N> load_v(const uint4* from) {
  vector<uint4, N> out;
  std::memcpy(out.pairs.data(), from, N / 2);
  return out;
}
template <unsigned N, class T>
vector<std::remove_const_t<T>, N> load_unaligned_v(const T* from, unsigned = 1) {
  return load_v<N>(from);
}
template <class T, unsigned N>
void store_v(T* to, const vector<T, N>& x) {
  std::memcpy(static_cast<void*>(to), static_cast<const void*>(x.lanes.data()), sizeof(T) * N);
}
template <class T, unsigned N>
void store_unaligned_v(T* to, const vector<T, N>& x, unsigned = 1) {
  store_v(to, x);
}

template <class T, unsigned N>
vector<T, N> broadcast(T x) {
  vector<T, N> out;
  out.lanes.fill(x);
  return out;
}
template <class T, unsigned N>
auto zeros() {
  if constexpr (std::is_same_v<T, accfloat>) {
    return accum<T, N>{};
  } else {
    return vector<T, N>{};
  }
}

// Products are exact in float32 where the factors are bfloat16, and sums round once a term.
template <class T, unsigned N>
accum<accfloat, N> mul(const vector<T, N>& a, const vector<T, N>& b) {
  accum<accfloat, N> out;
  for (unsigned i = 0; i < N; ++i) {
    out.lanes[i] = static_cast<float>(a.lanes[i]) * static_cast<float>(b.lanes[i]);
  }
  return out;
}
template <class T, unsigned N>
accum<accfloat, N> mul(const vector<T, N>& a, T b) {
  return mul(a, broadcast<T, N>(b));
}
template <class T, unsigned N>
accum<accfloat, N> mac(accum<accfloat, N> sum, const vector<T, N>& a, const vector<T, N>& b) {
  for (unsigned i = 0; i < N; ++i) {
    sum.lanes[i] += static_cast<float>(a.lanes[i]) * static_cast<float>(b.lanes[i]);
  }
  return sum;
}
template <class T, unsigned N>
accum<accfloat, N> msc(accum<accfloat, N> sum, const vector<T, N>& a, const vector<T, N>& b) {
  for (unsigned i = 0; i < N; ++i) {
    sum.lanes[i] -= static_cast<float>(a.lanes[i]) * static_cast<float>(b.lanes[i]);
  }
  return sum;
}

template <unsigned N>
accum<accfloat, N> add(accum<accfloat, N> a, const accum<accfloat, N>& b) {
  for (unsigned i = 0; i < N; ++i) a.lanes[i] += b.lanes[i];
  return a;
}
template <unsigned N>
accum<accfloat, N> sub(accum<accfloat, N> a, const accum<accfloat, N>& b) {
  for (unsigned i = 0; i < N; ++i) a.lanes[i] -= b.lanes[i];
  return a;
}
template <unsigned N>
vector<float, N> add(vector<float, N> a, const vector<float, N>& b) {
  for (unsigned i = 0; i < N; ++i) a.lanes[i] += b.lanes[i];
  return a;
}
template <unsigned N>
vector<float, N> sub(vector<float, N> a, const vector<float, N>& b) {
  for (unsigned i = 0; i < N; ++i) a.lanes[i] -= b.lanes[i];
  return a;
}
template <class T, unsigned N>
vector<T, N> max(vector<T, N> a, const vector<T, N>& b) {
  for (unsigned i = 0; i < N; ++i) a.lanes[i] = a.lanes[i] < b.lanes[i] ? b.lanes[i] : a.lanes[i];
  return a;
}
template <class T, unsigned N>
vector<T, N> min(vector<T, N> a, const vector<T, N>& b) {
  for (unsigned i = 0; i < N; ++i) a.lanes[i] = b.lanes[i] < a.lanes[i] ? b.lanes[i] : a.lanes[i];
  return a;
}

// A tree in which lane i meets lane i + half.
template <unsigned N>
float reduce_add(vector<float, N> x) {
  for (unsigned half = N / 2; half > 0; half /= 2) {
    for (unsigned i = 0; i < half; ++i) x.lanes[i] += x.lanes[i + half];
  }
  return x.lanes[0];
}
template <class T, unsigned N>
T reduce_max(vector<T, N> x) {
  for (unsigned half = N / 2; half > 0; half /= 2) {
    for (unsigned i = 0; i < half; ++i) {
      x.lanes[i] = x.lanes[i] < x.lanes[i + half] ? x.lanes[i + half] : x.lanes[i];
    }
  }
  return x.lanes[0];
}

}  // namespace aie
