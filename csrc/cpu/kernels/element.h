// Included after Vec. The types that lie in memory, as vectors of f32.
namespace fasttps::cpu {
namespace {

// load_chunk: 2 * kLanes elements as two vectors: the even and the odd ones where kSplitsPairs (the
// cheapest way to widen bf16), else the first and the second half.
struct F32 {
  using Storage = float;
  static constexpr bool kScaled = false;  // no factor beside the row
  static constexpr bool kSplitsPairs = false;
  template <class Vec>
  static Vec load(const float* p) {
    return Vec::load(p);
  }
  template <class Vec>
  static void store(Vec x, float* p) {
    x.store(p);
  }
};

struct Bf16 {
  using Storage = uint16_t;
  static constexpr bool kScaled = false;
  static constexpr bool kSplitsPairs = true;
  template <class Vec>
  static Vec load(const uint16_t* p) {
    return Vec::load_bf16(p);
  }
  template <class Vec>
  static void store(Vec x, uint16_t* p) {
    x.store_bf16(p);
  }
  template <class Vec>
  static void load_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    Vec::load_bf16_pairs(p, even, odd);
  }
};

struct F16 {
  using Storage = uint16_t;
  static constexpr bool kScaled = false;
  static constexpr bool kSplitsPairs = false;
  template <class Vec>
  static Vec load(const uint16_t* p) {
    return Vec::load_f16(p);
  }
  template <class Vec>
  static void store(Vec x, uint16_t* p) {
    x.store_f16(p);
  }
  template <class Vec>
  static void load_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    Vec::load_f16_pairs(p, even, odd);
  }
};

struct Int8 {
  using Storage = int8_t;
  static constexpr bool kScaled = true;
  static constexpr bool kSplitsPairs = false;
  template <class Vec>
  static Vec load(const int8_t* p) {
    return Vec::load_i8(p);
  }
};

template <class Vec, class Element>
inline void load_chunk(const typename Element::Storage* p, Vec& a, Vec& b) {
  if constexpr (Element::kSplitsPairs) {
    Element::load_pairs(p, a, b);
  } else {
    a = Element::template load<Vec>(p);
    b = Element::template load<Vec>(p + Vec::kLanes);
  }
}

// 2 * kLanes elements of which only `count` exist, zeros after them; reads nothing beyond.
template <class Vec, class Storage>
inline void copy_chunk(const Storage* p, int64_t count, Storage* lanes) {
  constexpr int64_t kElementBytes = sizeof(Storage);
  Vec::copy_bytes(p, count * kElementBytes, lanes);
  if constexpr (2 * Vec::kLanes * kElementBytes > 64) {
    const int64_t first = 64 / kElementBytes;
    Vec::copy_bytes(p + first, count > first ? (count - first) * kElementBytes : 0, lanes + first);
  }
}

template <class Vec, class Element>
inline void load_chunk_partial(const typename Element::Storage* p, int64_t count, Vec& a, Vec& b) {
  typename Element::Storage lanes[128 / sizeof(typename Element::Storage)];
  copy_chunk<Vec>(p, count, lanes);
  load_chunk<Vec, Element>(lanes, a, b);
}

// The first `count` < kLanes elements, zeros after them; reads nothing beyond.
template <class Vec, class Element>
inline Vec load_partial(const typename Element::Storage* p, int64_t count) {
  typename Element::Storage lanes[Vec::kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return Element::template load<Vec>(lanes);
}

template <class Vec, class Element>
inline void store_partial(Vec x, typename Element::Storage* p, int64_t count) {
  typename Element::Storage lanes[Vec::kLanes];
  Element::store(x, lanes);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

template <class Vec, class Element>
inline Vec load_up_to(const typename Element::Storage* p, int64_t count) {
  return count >= Vec::kLanes ? Element::template load<Vec>(p)
                              : load_partial<Vec, Element>(p, count);
}

template <class Vec>
inline float first_lane(Vec x) {
  float lanes[Vec::kLanes];
  x.store(lanes);
  return lanes[0];
}

template <class Vec, class Element>
void load_row(const void* x, float* out, int64_t count) {
  const auto* p = static_cast<const typename Element::Storage*>(x);
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) {
    Element::template load<Vec>(p + i).store(out + i);
  }
  if (i < count) {
    store_partial<Vec, F32>(load_partial<Vec, Element>(p + i, count - i), out + i, count - i);
  }
}

template <class Vec, class Element>
void store_row(const float* x, float factor, void* out, int64_t count) {
  auto* p = static_cast<typename Element::Storage*>(out);
  const Vec times = Vec::set(factor);
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) {
    Element::store(Vec::load(x + i) * times, p + i);
  }
  if (i < count) {
    const Vec tail = load_partial<Vec, F32>(x + i, count - i) * times;
    store_partial<Vec, Element>(tail, p + i, count - i);
  }
}

}  // namespace
}  // namespace fasttps::cpu
