// Included after quantized_format.h and prepare.h. Products of quantised weights with int8 and with
// f32 activations.
namespace fasttps::cpu {
namespace {

// Bytes from one run to the next, its share of the scales of the smallest group counted.
template <class Weight>
inline constexpr int64_t kRunStride =
    Weight::group_bytes(Weight::group_cols(kRunCols)) * kRunCols / Weight::group_cols(kRunCols);

template <class Weight, int kTokens>
inline constexpr bool kReadOnce = kTokens <= 4 && kRunStride<Weight> >= kRunCols * kPanelRows;

template <class VecType, class Weight>
struct QuantizedProduct {
  using Vec = VecType;
  using Int = typename Vec::Int;
  static constexpr int64_t kBlock = 512;
  static constexpr int kFewTokens = Weight::kSmall ? 3 : 4;

  static int64_t panel_bytes(int64_t cols, int64_t group_size) {
    return quantized_panel_bytes<Weight>(cols, group_size);
  }

  // totals += sums, times the factor of the row where the format has one.
  static void add_to(float* totals, Vec sum, const uint8_t* panel, const TileInput& in,
                     int64_t lane) {
    const Vec total = Vec::load(totals);
    if constexpr (Weight::kRowScale) {
      const Vec d = Vec::load(row_scales<Weight>(panel, in.cols, in.group_size) + lane);
      fmadd(sum, d, total).store(totals);
    } else {
      (total + sum).store(totals);
    }
  }
};

// Activations in int8, 32 columns at a time: integer sums of a run, then one f32 step.
template <class VecType, class Weight>
struct Int8Product : QuantizedProduct<VecType, Weight> {
  using Base = QuantizedProduct<VecType, Weight>;
  using typename Base::Int;
  using typename Base::Vec;
  static constexpr ActivationKind kKind = kActInt8;
  template <int kPanels>
  static constexpr int kMostTokens = Vec::kLanes == 16  ? (kPanels == 2 ? 6 : 4)
                                     : Vec::kLanes == 8 ? 4
                                                        : 2;

  static Int dot(Int sum, Int weight, Int x) {
    if constexpr (Weight::kSmall) {
      return dot_small_bytes(sum, weight, x);
    } else {
      return dot_bytes(sum, weight, x);
    }
  }

  template <int kPanels, int kTokens>
  static void add(const TileInput& in, int64_t begin, int64_t end, float* totals,
                  int64_t token_stride) {
    constexpr int strips = kStrips<Vec, kPanels>;
    for_each_strip<Vec, kPanels>(totals, [&](int panel, int64_t lane, float* to) {
      add_strips<strips, kTokens>(in, panel, lane, begin, end, to, token_stride);
    });
  }

  template <int strips, int kTokens>
  static void add_strips(const TileInput& in, int first_panel, int64_t lane, int64_t begin,
                         int64_t end, float* totals, int64_t token_stride) {
    constexpr int kSub = Weight::kSubBlocks;
    static_assert(kSub == 1 || !Weight::kHasMin);
    const int64_t group_cols = Weight::group_cols(in.group_size);
    const int64_t group_bytes = Weight::group_bytes(group_cols);
    const int64_t runs = group_cols / kRunCols;
    const auto* x = reinterpret_cast<const Int8Run*>(in.activation) + begin / kRunCols;
    const int64_t x_stride = in.activation_bytes / static_cast<int64_t>(sizeof(Int8Run));
    const auto* panel = reinterpret_cast<const uint8_t*>(in.panels + first_panel * in.panel_stride);
    const uint8_t* group = panel + begin / group_cols * group_bytes;
    const Fetch<strips> fetch(in, first_panel, lane);
    Vec acc[strips][kTokens];
    for (auto& strip : acc) {
      for (Vec& sum : strip) sum = Vec::set(0.0f);
    }
    for (int64_t col = begin; col < end; col += group_cols, group += group_bytes) {
      for (int64_t run = 0; run < runs; ++run, ++x) {
        for (int s = 0; s < strips; ++s) {
          if (fetch.strip[s]) {
            fetch_ahead<kRunStride<Weight>, kReadOnce<Weight, kTokens>>(
                group + s * in.panel_stride + run * (group_bytes / runs));
          }
        }
        // One sub-block after the other, so that registers hold the sums of one.
#pragma GCC unroll 2
        for (int k = 0; k < kSub; ++k) {
          Int sums[strips][kTokens];
          for (int m = 0; m < kTokens; ++m) {
            const Int start = Int::set(x[m * x_stride].template start<Weight::kOffset>(k));
            for (int s = 0; s < strips; ++s) sums[s][m] = start;
          }
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            Int low[strips], high[strips];
            for (int s = 0; s < strips; ++s) {
              Weight::quad(group + s * in.panel_stride, group_cols, run, lane, j, low[s], high[s]);
            }
#pragma GCC unroll 16
            for (int m = 0; m < kTokens; ++m) {
              if (k == 0) {
                const Int a = Int::set(x[m * x_stride].quad(j));
                for (int s = 0; s < strips; ++s) sums[s][m] = dot(sums[s][m], low[s], a);
              }
              if (k == kSub - 1) {
                const Int b = Int::set(x[m * x_stride].quad(j + 4));
                for (int s = 0; s < strips; ++s) sums[s][m] = dot(sums[s][m], high[s], b);
              }
            }
          }
          for (int s = 0; s < strips; ++s) {
            const auto scales =
                Weight::template scales<Vec>(group + s * in.panel_stride, group_cols, run, lane);
#pragma GCC unroll 16
            for (int m = 0; m < kTokens; ++m) {
              const Int8Run& of = x[m * x_stride];
              const Vec scale = Vec::set(of.scale), products = to_float(sums[s][m]);
              Vec& sum = acc[s][m];
              if constexpr (Weight::kRowScale) {
                sum = fmadd(products, scale, sum);
              } else {
                sum = fmadd(products * scale, scales.scale[k], sum);
              }
              if constexpr (Weight::kHasMin) sum = fmadd(Vec::set(of.sum), scales.shift[0], sum);
            }
          }
        }
      }
    }
    for (int s = 0; s < strips; ++s) {
      for (int m = 0; m < kTokens; ++m) {
        Base::add_to(totals + m * token_stride + s * kPanelRows, acc[s][m],
                     panel + s * in.panel_stride, in, lane);
      }
    }
  }
};

// first, first + 1, ... in the lanes.
template <class Vec>
inline Vec lookup_table(float first) {
  float lanes[Vec::kLanes];
  for (int i = 0; i < Vec::kLanes; ++i) lanes[i] = first + static_cast<float>(i);
  return Vec::load(lanes);
}

// f32 activations: the weights are dequantised in registers.
template <class VecType, class Weight>
struct DequantizedProduct : QuantizedProduct<VecType, Weight> {
  using Base = QuantizedProduct<VecType, Weight>;
  using typename Base::Int;
  using typename Base::Vec;
  static constexpr ActivationKind kKind = kActF32;
  template <int kPanels>
  static constexpr int kMostTokens = Vec::kLanes == 16  ? (kPanels == 2 ? 8 : 4)
                                     : Vec::kLanes == 8 ? 8
                                                        : 2;

  template <int kPanels, int kTokens>
  static void add(const TileInput& in, int64_t begin, int64_t end, float* totals,
                  int64_t token_stride) {
    constexpr int strips = kStrips<Vec, kPanels>;
    for_each_strip<Vec, kPanels>(totals, [&](int panel, int64_t lane, float* to) {
      add_strips<strips, kTokens>(in, panel, lane, begin, end, to, token_stride);
    });
  }

  // Columns b = kShift / 8 of the four of a quad, as floats. Where a vector has a table of 16
  // entries and a quant has 4 bits, one lookup finds q - kOffset; else q is converted.
  static constexpr bool kLookup = Vec::kHasLookup && Weight::kIsNibbles;

  template <int kShift>
  static Vec quants(Int quad) {
    if constexpr (kShift == 24) {
      return to_float(shift_right<24>(quad));
    } else {
      return to_float(shift_right<kShift>(quad) & Int::set(0xff));
    }
  }
  static Vec dequantized(Vec q, const RunScales<Vec>& scales, int sub_block) {
    if constexpr (Weight::kRowScale) {
      return q + scales.shift[sub_block];
    } else if constexpr (kLookup && !Weight::kHasMin) {
      return q * scales.scale[0];
    } else {
      return fmadd(q, scales.scale[sub_block], scales.shift[sub_block]);
    }
  }

  template <int strips, int kTokens>
  static void add_strips(const TileInput& in, int first_panel, int64_t lane, int64_t begin,
                         int64_t end, float* totals, int64_t token_stride) {
    // Few sums at once depend on each other too closely: the four columns then have their own.
    constexpr int kSums = strips * kTokens;
    constexpr int kTurns = kSums >= 8 ? 1 : kSums >= 4 ? 2 : 4;
    // Few tokens share too little to scale each weight: the sums of a run are scaled instead.
    constexpr bool kScaleSums = kLookup && !Weight::kHasMin && kTurns == 4;
    const int64_t group_cols = Weight::group_cols(in.group_size);
    const int64_t group_bytes = Weight::group_bytes(group_cols);
    const int64_t runs = group_cols / kRunCols;
    const auto* x = reinterpret_cast<const float*>(in.activation) + begin;
    const int64_t x_stride = in.activation_bytes / 4;
    const auto* panel = reinterpret_cast<const uint8_t*>(in.panels + first_panel * in.panel_stride);
    const uint8_t* group = panel + begin / group_cols * group_bytes;
    const Vec table = lookup_table<Vec>(static_cast<float>(-Weight::kOffset));
    const Fetch<strips> fetch(in, first_panel, lane);
    Vec total[strips][kTokens];
    Vec acc[kTurns][strips][kTokens];
    const auto start = [&] {
      for (auto& turn : acc) {
        for (auto& strip : turn) {
          for (Vec& sum : strip) sum = Vec::set(0.0f);
        }
      }
    };
    start();
    if constexpr (kScaleSums) {
      for (auto& strip : total) {
        for (Vec& sum : strip) sum = Vec::set(0.0f);
      }
    }
    for (int64_t col = begin; col < end; col += group_cols, group += group_bytes) {
      for (int64_t run = 0; run < runs; ++run, x += kRunCols) {
        RunScales<Vec> scales[strips];
        for (int s = 0; s < strips; ++s) {
          const uint8_t* of = group + s * in.panel_stride;
          scales[s] = Weight::template scales<Vec>(of, group_cols, run, lane);
          if (fetch.strip[s]) {
            fetch_ahead<kRunStride<Weight>, kReadOnce<Weight, kTokens>>(of +
                                                                        run * (group_bytes / runs));
          }
        }
        const auto columns = [&](const Int* quad, int half, int64_t at, auto shift,
                                 Vec(&turn)[strips][kTokens]) {
          const int k = half < Weight::kSubBlocks ? half : 0;
          Vec weight[strips];
          for (int s = 0; s < strips; ++s) {
            if constexpr (kLookup) {
              weight[s] = lookup(table, shift_right<decltype(shift)::value>(quad[s]));
            } else {
              weight[s] = quants<decltype(shift)::value>(quad[s]);
            }
            if constexpr (!kScaleSums) weight[s] = dequantized(weight[s], scales[s], k);
          }
#pragma GCC unroll 16
          for (int m = 0; m < kTokens; ++m) {
            const Vec a = Vec::set(x[m * x_stride + at]);
            for (int s = 0; s < strips; ++s) turn[s][m] = fmadd(a, weight[s], turn[s][m]);
          }
        };
        for (int pair = 0; pair < 2; ++pair) {
#pragma GCC unroll 2
          for (int odd = 0; odd < 2; ++odd) {
            Int quads[2][strips];
            for (int s = 0; s < strips; ++s) {
              Weight::quad(group + s * in.panel_stride, group_cols, run, lane, 2 * pair + odd,
                           quads[0][s], quads[1][s]);
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
              const int64_t at = 16 * half + 8 * pair + 4 * odd;
              columns(quads[half], half, at, Constant<0>{}, acc[0]);
              columns(quads[half], half, at + 1, Constant<8>{}, acc[1 % kTurns]);
              columns(quads[half], half, at + 2, Constant<16>{}, acc[2 % kTurns]);
              columns(quads[half], half, at + 3, Constant<24>{}, acc[3 % kTurns]);
            }
          }
        }
        if constexpr (kScaleSums) {
          for (int s = 0; s < strips; ++s) {
            for (int m = 0; m < kTokens; ++m) {
              const Vec sum = (acc[0][s][m] + acc[1][s][m]) + (acc[2][s][m] + acc[3][s][m]);
              total[s][m] = fmadd(sum, scales[s].scale[0], total[s][m]);
            }
          }
          start();
        }
      }
    }
    for (int s = 0; s < strips; ++s) {
      for (int m = 0; m < kTokens; ++m) {
        Vec sum = kScaleSums ? total[s][m] : acc[0][s][m];
        for (int t = 1; t < kTurns && !kScaleSums; ++t) sum = sum + acc[t][s][m];
        Base::add_to(totals + m * token_stride + s * kPanelRows, sum, panel + s * in.panel_stride,
                     in, lane);
      }
    }
  }
};

}  // namespace
}  // namespace fasttps::cpu
