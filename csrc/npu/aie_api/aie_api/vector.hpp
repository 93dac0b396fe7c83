#pragma once
#include "types.hpp"

namespace aie::inline AIE_HOST_CORE {

template <class T, unsigned N>
struct vector {
  T lanes[N];

  static constexpr unsigned size() { return N; }
  T get(unsigned i) const { return lanes[i]; }
  void set(T x, unsigned i) { lanes[i] = x; }
  template <unsigned M>
  vector<T, M> extract(unsigned part) const {
    vector<T, M> out;
    std::memcpy(static_cast<void*>(out.lanes), lanes + part * M, sizeof out);
    return out;
  }
  template <class U>
  vector<U, N * sizeof(T) / sizeof(U)> cast_to() const {
    vector<U, N * sizeof(T) / sizeof(U)> out;
    std::memcpy(static_cast<void*>(out.lanes), lanes, sizeof out);
    return out;
  }
  vector<int16, N> unpack() const {
    vector<int16, N> out;
    for (unsigned i = 0; i < N; ++i) out.lanes[i] = static_cast<int16>(lanes[i]);
    return out;
  }
};

template <class Tag, unsigned N>
struct accum {
  using type = typename lane<Tag>::type;
  type lanes[N];

  accum() = default;
  template <class T>
  explicit accum(const vector<T, N>& from) {
    for (unsigned i = 0; i < N; ++i) lanes[i] = static_cast<type>(from.lanes[i]);
  }
  template <class T>
  vector<T, N> to_vector(int shift = 0) const {
    vector<T, N> out;
    for (unsigned i = 0; i < N; ++i) {
      if constexpr (std::is_same_v<type, float>)
        out.lanes[i] = narrow<T>(lanes[i], shift);
      else
        out.lanes[i] = narrow<T>(static_cast<int64_t>(lanes[i]), shift);
    }
    return out;
  }
};

template <unsigned N>
struct mask {
  bool lanes[N];
  bool test(unsigned i) const { return lanes[i]; }
};

template <unsigned N, class T>
vector<T, N> load_v(const T* from) {
  vector<T, N> out;
  std::memcpy(static_cast<void*>(out.lanes), from, sizeof out);
  return out;
}
template <class T, unsigned N>
void store_v(T* to, const vector<T, N>& v) {
  std::memcpy(static_cast<void*>(to), v.lanes, sizeof v);
}
template <class T, unsigned N>
vector<T, N> broadcast(std::type_identity_t<T> x) {
  vector<T, N> out;
  for (T& to : out.lanes) to = x;
  return out;
}
template <class T, unsigned N>
auto zeros() {
  if constexpr (std::is_same_v<T, accfloat> || std::is_same_v<T, acc32> ||
                std::is_same_v<T, acc64>) {
    accum<T, N> out;
    for (auto& x : out.lanes) x = 0;
    return out;
  } else {
    return broadcast<T, N>(T(0));
  }
}
template <class T, unsigned N>
vector<T, 2 * N> concat(const vector<T, N>& a, const vector<T, N>& b) {
  vector<T, 2 * N> out;
  for (unsigned i = 0; i < N; ++i) {
    out.lanes[i] = a.lanes[i];
    out.lanes[N + i] = b.lanes[i];
  }
  return out;
}

// bf16 products are exact in f32; sums round to nearest, lane by lane.
template <class T, unsigned N>
auto mul(const vector<T, N>& a, const vector<T, N>& b) {
  using Out = accum<accumulator_of<T>, N>;
  Out out;
  for (unsigned i = 0; i < N; ++i)
    out.lanes[i] =
        static_cast<typename Out::type>(a.lanes[i]) * static_cast<typename Out::type>(b.lanes[i]);
  return out;
}
template <class Tag, class T, unsigned N>
accum<Tag, N> mac(accum<Tag, N> c, const vector<T, N>& a, const vector<T, N>& b) {
  using type = typename lane<Tag>::type;
  for (unsigned i = 0; i < N; ++i)
    c.lanes[i] += static_cast<type>(a.lanes[i]) * static_cast<type>(b.lanes[i]);
  return c;
}
template <class Tag, class T, unsigned N>
accum<Tag, N> msc(accum<Tag, N> c, const vector<T, N>& a, const vector<T, N>& b) {
  using type = typename lane<Tag>::type;
  for (unsigned i = 0; i < N; ++i)
    c.lanes[i] -= static_cast<type>(a.lanes[i]) * static_cast<type>(b.lanes[i]);
  return c;
}
template <class T, unsigned N>
vector<T, N> add(vector<T, N> a, const vector<T, N>& b) {
  for (unsigned i = 0; i < N; ++i) a.lanes[i] = static_cast<T>(a.lanes[i] + b.lanes[i]);
  return a;
}
template <class T, unsigned N>
vector<T, N> sub(vector<T, N> a, const vector<T, N>& b) {
  for (unsigned i = 0; i < N; ++i) a.lanes[i] = static_cast<T>(a.lanes[i] - b.lanes[i]);
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
template <class T, unsigned N>
mask<N> lt(const vector<T, N>& a, const vector<T, N>& b) {
  mask<N> out;
  for (unsigned i = 0; i < N; ++i) out.lanes[i] = a.lanes[i] < b.lanes[i];
  return out;
}
// b where the mask is set.
template <class T, unsigned N>
vector<T, N> select(vector<T, N> a, const vector<T, N>& b, const mask<N>& m) {
  for (unsigned i = 0; i < N; ++i)
    if (m.lanes[i]) a.lanes[i] = b.lanes[i];
  return a;
}
template <class T, unsigned N>
T reduce_max(const vector<T, N>& v) {
  T out = v.lanes[0];
  for (T x : v.lanes) out = out < x ? x : out;
  return out;
}
// As a tree: lane i with lane i + N / 2.
template <class T, unsigned N>
T reduce_add(vector<T, N> v) {
  for (unsigned half = N / 2; half > 0; half /= 2)
    for (unsigned i = 0; i < half; ++i) v.lanes[i] = v.lanes[i] + v.lanes[i + half];
  return v.lanes[0];
}
template <unsigned N>
vector<uint8, N> bit_and(uint8 bits, vector<uint8, N> v) {
  for (uint8& x : v.lanes) x &= bits;
  return v;
}
template <unsigned N>
vector<uint8, N> downshift(vector<uint8, N> v, unsigned by) {
  for (uint8& x : v.lanes) x = static_cast<uint8>(x >> by);
  return v;
}
template <unsigned N>
vector<int32, N> upshift(vector<int32, N> v, unsigned by) {
  for (int32& x : v.lanes) x = static_cast<int32>(static_cast<uint32_t>(x) << by);
  return v;
}
template <class T, unsigned N>
vector<T, N / 2> filter(const vector<T, N>& v, unsigned odd) {
  vector<T, N / 2> out;
  for (unsigned i = 0; i < N / 2; ++i) out.lanes[i] = v.lanes[2 * i + odd];
  return out;
}
template <class T, unsigned N>
vector<T, N / 2> filter_even(const vector<T, N>& v) {
  return filter(v, 0);
}
template <class T, unsigned N>
vector<T, N / 2> filter_odd(const vector<T, N>& v) {
  return filter(v, 1);
}
// a0 b0 a1 b1 ...
template <class T, unsigned N>
vector<T, 2 * N> interleave(const vector<T, N>& a, const vector<T, N>& b) {
  vector<T, 2 * N> out;
  for (unsigned i = 0; i < N; ++i) {
    out.lanes[2 * i] = a.lanes[i];
    out.lanes[2 * i + 1] = b.lanes[i];
  }
  return out;
}
template <class T, unsigned N>
vector<T, N> transpose(const vector<T, N>& v, unsigned rows, unsigned columns) {
  vector<T, N> out;
  for (unsigned i = 0; i < rows; ++i)
    for (unsigned j = 0; j < columns; ++j) out.lanes[j * rows + i] = v.lanes[i * columns + j];
  return out;
}

}  // namespace aie::inline AIE_HOST_CORE
