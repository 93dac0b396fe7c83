// Included after quantized_format.h. Rounds a weight to a quantised format, panel by panel.
//
// Scales minimise the squared error of a group over a few candidates and least-squares fits. Sums
// run over 16 lanes and are then halved, whatever the vector, so that every instruction set and the
// twin in plain PyTorch choose alike to the bit. A group with a NaN or an infinity gets scale NaN.
namespace fasttps::cpu {
namespace {

inline constexpr int64_t kMostGroupCols = 128;

inline float round_to_f16(float x) { return f16_to_f32(f32_to_f16(x)); }

inline float halving_sum(float (&lanes)[16]) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] + lanes[i + width];
  }
  return lanes[0];
}

// The sum over `count` columns, a multiple of 16, of term(column of the first lane).
template <class Vec, class Term>
inline float sum_of(int64_t count, const Term& term) {
  constexpr int kVecs = 16 / Vec::kLanes;
  Vec sums[kVecs];
  for (Vec& sum : sums) sum = Vec::set(0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    for (int v = 0; v < kVecs; ++v) sums[v] = sums[v] + term(i + v * Vec::kLanes);
  }
  float lanes[16];
  for (int v = 0; v < kVecs; ++v) sums[v].store(lanes + v * Vec::kLanes);
  return halving_sum(lanes);
}

struct GroupFacts {
  float least, largest;
  bool finite;
};

template <class Vec>
inline GroupFacts facts_of(const float* x, int64_t count) {
  Vec least = Vec::load(x), largest = least;
  for (int64_t i = Vec::kLanes; i < count; i += Vec::kLanes) {
    least = min(least, Vec::load(x + i));
    largest = max(largest, Vec::load(x + i));
  }
  const float zero =
      sum_of<Vec>(count, [&](int64_t i) { return Vec::load(x + i) * Vec::set(0.0f); });
  // + 0: of zeros of both signs, which one is the least depends on the vector; -0 + 0 = 0.
  return {-reduce_max(-least) + 0.0f, reduce_max(largest) + 0.0f, zero == 0.0f};
}

// Quants of one candidate: q = rint(clamp((x - m) / d)), 0 where d is 0.
struct Levels {
  float d, m;
  float least, most;  // of q
};

template <class Vec>
inline Vec quant_at(const float* x, int64_t i, const Levels& levels) {
  if (levels.d == 0.0f) return Vec::set(0.0f);
  const Vec q = (Vec::load(x + i) - Vec::set(levels.m)) / Vec::set(levels.d);
  return rint(max(Vec::set(levels.least), min(Vec::set(levels.most), q)));
}

template <class Vec>
inline float squared_error(const float* x, int64_t count, const Levels& levels) {
  return sum_of<Vec>(count, [&](int64_t i) {
    const Vec q = quant_at<Vec>(x, i, levels);
    const Vec error = Vec::load(x + i) - (q * Vec::set(levels.d) + Vec::set(levels.m));
    return error * error;
  });
}

// d q with q in -8..7: the element of largest magnitude at -7 to -9.5, then the best d for the
// quants of the best of these.
template <class Vec>
inline Levels int4_levels(const float* x, int64_t count, const GroupFacts& facts) {
  const float extreme = -facts.least >= facts.largest ? facts.least : facts.largest;
  Levels best{round_to_f16(extreme / -7.0f), 0.0f, -8.0f, 7.0f};
  float least_error = squared_error<Vec>(x, count, best);
  const auto consider = [&](float d) {
    const Levels levels{d, 0.0f, -8.0f, 7.0f};
    const float error = squared_error<Vec>(x, count, levels);
    if (error < least_error) {
      least_error = error;
      best = levels;
    }
  };
  for (int i = 1; i <= 10; ++i) {
    consider(round_to_f16(extreme / (-7.0f - 0.25f * static_cast<float>(i))));
  }
  const Levels found = best;
  const float xq =
      sum_of<Vec>(count, [&](int64_t i) { return Vec::load(x + i) * quant_at<Vec>(x, i, found); });
  const float qq = sum_of<Vec>(count, [&](int64_t i) {
    const Vec q = quant_at<Vec>(x, i, found);
    return q * q;
  });
  if (qq > 0.0f) consider(round_to_f16(xq / qq));
  return best;
}

// d q + m with q in 0..15: the range shrunk by up to a fifth, each followed by two fits.
template <class Vec>
inline Levels int4_min_levels(const float* x, int64_t count, const GroupFacts& facts) {
  const float range = facts.largest - facts.least;
  const float middle = facts.least + 0.5f * range;
  Levels best{0.0f, 0.0f, 0.0f, 15.0f};
  float least_error = __builtin_inff();
  const auto consider = [&](const Levels& levels) {
    const float error = squared_error<Vec>(x, count, levels);
    if (error < least_error) {
      least_error = error;
      best = levels;
    }
  };
  const float n = static_cast<float>(count);
  const float sum_x = sum_of<Vec>(count, [&](int64_t i) { return Vec::load(x + i); });
  for (int i = 0; i < 5; ++i) {
    const float width = range * (1.0f - 0.05f * static_cast<float>(i));
    Levels levels{round_to_f16(width / 15.0f), round_to_f16(middle - 0.5f * width), 0.0f, 15.0f};
    consider(levels);
    for (int fit = 0; fit < 2; ++fit) {
      const auto q = [&](int64_t at) { return quant_at<Vec>(x, at, levels); };
      const float sum_q = sum_of<Vec>(count, q);
      const float sum_qq = sum_of<Vec>(count, [&](int64_t at) { return q(at) * q(at); });
      const float sum_xq =
          sum_of<Vec>(count, [&](int64_t at) { return Vec::load(x + at) * q(at); });
      const float determinant = n * sum_qq - sum_q * sum_q;
      if (!(determinant > 0.0f)) break;
      levels.d = round_to_f16((n * sum_xq - sum_q * sum_x) / determinant);
      levels.m = round_to_f16((sum_qq * sum_x - sum_q * sum_xq) / determinant);
      consider(levels);
    }
  }
  return best;
}

inline void store_u16(uint8_t* p, float x) {
  const uint16_t bits = f32_to_f16(x);
  __builtin_memcpy(p, &bits, 2);
}

// One row in f32, a group at a time; what lies past its end repeats `fill`.
template <class Vec>
inline void load_group(const PackPanelTask& task, int64_t row, int64_t col, int64_t count,
                       bool repeat, float* x) {
  const int64_t inside = task.cols - col < count ? task.cols - col : count;
  const int64_t at = row * task.row_stride + col;
  switch (task.type) {
    case kBf16:
      load_row<Vec, Bf16>(static_cast<const uint16_t*>(task.weight) + at, x, inside);
      break;
    case kF16:
      load_row<Vec, F16>(static_cast<const uint16_t*>(task.weight) + at, x, inside);
      break;
    default:
      load_row<Vec, F32>(static_cast<const float*>(task.weight) + at, x, inside);
  }
  for (int64_t i = inside; i < count; ++i) x[i] = repeat ? x[inside - 1] : 0.0f;
}

// q[count] as unsigned quants, `offset` added.
template <class Vec>
inline void quantize(const float* x, int64_t count, const Levels& levels, int offset, uint8_t* q) {
  float lanes[Vec::kLanes];
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    quant_at<Vec>(x, i, levels).store(lanes);
    for (int64_t lane = 0; lane < Vec::kLanes; ++lane) {
      // NaN where the scale of a huge weight is infinite, which shows in the scale itself.
      const int level = lanes[lane] == lanes[lane] ? static_cast<int>(lanes[lane]) : 0;
      q[i + lane] = static_cast<uint8_t>(level + offset);
    }
  }
}

inline void put_nibbles(const uint8_t* q, int64_t row, uint8_t* run) {
  for (int64_t j = 0; j < 4; ++j) {
    for (int64_t b = 0; b < 4; ++b) {
      run[64 * j + 4 * row + b] = static_cast<uint8_t>(q[4 * j + b] | (q[16 + 4 * j + b] << 4));
    }
  }
}

inline void put_bytes(const uint8_t* q, int64_t row, uint8_t* run) {
  for (int64_t j = 0; j < 8; ++j) __builtin_memcpy(run + 64 * j + 4 * row, q + 4 * j, 4);
}

template <class Vec, class Weight, class Row>
inline void for_each_row(const PackPanelTask& task, const Row& pack_row) {
  auto* panel = static_cast<uint8_t*>(task.packed_panel);
  __builtin_memset(
      panel, 0, static_cast<uint64_t>(quantized_panel_bytes<Weight>(task.cols, task.group_size)));
  for (int64_t r = 0; r < kPanelRows && task.panel * kPanelRows + r < task.rows; ++r) {
    pack_row(panel, r, task.panel * kPanelRows + r);
  }
}

template <class Vec>
void pack_int8_panel(const PackPanelTask& task) {
  for_each_row<Vec, Int8Weight>(task, [&](uint8_t* panel, int64_t r, int64_t row) {
    float x[kRunCols], largest = 0.0f;
    bool finite = true;
    for (int64_t col = 0; col < task.cols; col += kRunCols) {
      load_group<Vec>(task, row, col, kRunCols, false, x);
      const GroupFacts facts = facts_of<Vec>(x, kRunCols);
      finite = finite && facts.finite;
      largest = facts.largest > largest ? facts.largest : largest;
      largest = -facts.least > largest ? -facts.least : largest;
    }
    const float d = finite ? largest / 127.0f : __builtin_nanf("");
    const Levels levels{finite ? d : 0.0f, 0.0f, -127.0f, 127.0f};
    for (int64_t col = 0; col < task.cols; col += kRunCols) {
      uint8_t q[kRunCols];
      load_group<Vec>(task, row, col, kRunCols, false, x);
      quantize<Vec>(x, kRunCols, levels, 128, q);
      put_bytes(q, r, panel + col * kPanelRows);
    }
    uint8_t* scales = panel + quantized_panel_bytes<Int8Weight>(task.cols, 0) - 4 * kPanelRows;
    __builtin_memcpy(scales + 4 * r, &d, 4);
  });
}

template <class Vec>
void pack_int8_group_panel(const PackPanelTask& task) {
  using Weight = Int8GroupWeight;
  for_each_row<Vec, Weight>(task, [&](uint8_t* group, int64_t r, int64_t row) {
    for (int64_t col = 0; col < task.cols; col += kRunCols, group += Weight::group_bytes(0)) {
      float x[kRunCols];
      uint8_t q[kRunCols];
      load_group<Vec>(task, row, col, kRunCols, false, x);
      const GroupFacts facts = facts_of<Vec>(x, kRunCols);
      const float largest = -facts.least > facts.largest ? -facts.least : facts.largest;
      const float d = round_to_f16(largest / 127.0f);
      quantize<Vec>(x, kRunCols, {facts.finite ? d : 0.0f, 0.0f, -127.0f, 127.0f}, 128, q);
      put_bytes(q, r, group);
      store_u16(group + kByteRunBytes + 2 * r, facts.finite ? d : __builtin_nanf(""));
    }
  });
}

template <class Vec, class Weight>
void pack_int4_panel(const PackPanelTask& task) {
  const int64_t count = task.group_size;
  for_each_row<Vec, Weight>(task, [&](uint8_t* group, int64_t r, int64_t row) {
    for (int64_t col = 0; col < task.cols; col += count, group += Weight::group_bytes(count)) {
      float x[kMostGroupCols];
      uint8_t q[kMostGroupCols];
      load_group<Vec>(task, row, col, count, Weight::kHasMin, x);
      const GroupFacts facts = facts_of<Vec>(x, count);
      Levels levels{0.0f, 0.0f, 0.0f, 0.0f};
      if (facts.finite) {
        levels = Weight::kHasMin ? int4_min_levels<Vec>(x, count, facts)
                                 : int4_levels<Vec>(x, count, facts);
      }
      quantize<Vec>(x, count, levels, Weight::kOffset, q);
      for (int64_t run = 0; run < count / kRunCols; ++run) {
        put_nibbles(q + run * kRunCols, r, group + run * kNibbleRunBytes);
      }
      uint8_t* d = group + count / kRunCols * kNibbleRunBytes + 2 * r;
      store_u16(d, facts.finite ? levels.d : __builtin_nanf(""));
      if constexpr (Weight::kHasMin) {
        store_u16(d + kScaleBytes, facts.finite ? levels.m : __builtin_nanf(""));
      }
    }
  });
}

}  // namespace
}  // namespace fasttps::cpu
