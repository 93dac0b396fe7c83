// Included after Vec, math.h and element.h. Layout of the weights: pack_weight.h.
namespace fasttps::cpu {
namespace {

// Panels that lie panel_bytes apart, and tokens that lie activation_bytes apart.
struct TileInput {
  const char* panels;
  int64_t panel_bytes;
  const char* activation;
  int64_t activation_bytes;
};

// A product says how one format is multiplied with one kind of activation:
//   kKind, kBlock         kind of activation; columns whose products are summed before they are
//   added
//                         to the total, so that the rounding error grows with kBlock + cols /
//                         kBlock
//   panel_bytes           of cols columns
//   add<kPanels, kTokens> totals[token][panel][16] += columns [begin, end) . tokens; begin is a
//                         multiple of kBlock
// How many accumulators the registers of an instruction set hold:
template <class Vec>
inline constexpr int kAccumulators = Vec::kLanes == 16  ? 24
                                     : Vec::kLanes == 8 ? 12
                                                        : 16;

// Sums of products of single columns or pairs of columns: Step::run adds kStep columns of one
// vector of rows to one accumulator for each of kTokens tokens.
template <class Step>
struct SteppedProduct : Step {
  using Vec = typename Step::Vec;
  static constexpr int64_t kBlock = 128;

  static int64_t panel_bytes(int64_t cols, int64_t /*group_size*/) {
    return cols * kPanelRows * static_cast<int64_t>(sizeof(typename Step::Panel));
  }

  template <int kPanels, int kTokens>
  static void add(const TileInput& in, int64_t begin, int64_t end, float* totals) {
    using Panel = typename Step::Panel;
    using Activation = typename Step::Activation;
    constexpr int kVecs = kPanelRows / Vec::kLanes;
    constexpr int64_t kVecElements = Step::kStep * Vec::kLanes;
    // Few sums at once depend on each other too closely: columns then go to several in turn.
    constexpr int kSums = kPanels * kVecs * kTokens;
    constexpr int kTurns = kSums >= 8 ? 1 : 8 / kSums;
    const auto* panels = reinterpret_cast<const Panel*>(in.panels);
    const auto* x = reinterpret_cast<const Activation*>(in.activation);
    const int64_t panel_elements = in.panel_bytes / static_cast<int64_t>(sizeof(Panel));
    const int64_t x_stride = in.activation_bytes / static_cast<int64_t>(sizeof(Activation));
    Vec acc[kTurns][kPanels][kVecs][kTokens];
    for (auto& turn : acc) {
      for (auto& panel : turn) {
        for (auto& vec : panel) {
          for (Vec& sum : vec) sum = Vec::set(0.0f);
        }
      }
    }
    const auto step = [&](int64_t col, auto& turn) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v) {
          const Panel* panel = panels + p * panel_elements + col * kPanelRows + v * kVecElements;
          Step::template run<kTokens>(panel, x + col, x_stride, turn[p][v]);
        }
      }
    };
    int64_t col = begin;
    for (; col + kTurns * Step::kStep <= end; col += kTurns * Step::kStep) {
#pragma GCC unroll 8
      for (int t = 0; t < kTurns; ++t) step(col + t * Step::kStep, acc[t]);
    }
    for (; col < end; col += Step::kStep) step(col, acc[0]);
    for (int p = 0; p < kPanels; ++p) {
      for (int v = 0; v < kVecs; ++v) {
        for (int m = 0; m < kTokens; ++m) {
          float* total = totals + (m * kPanels + p) * kPanelRows + v * Vec::kLanes;
          Vec sum = acc[0][p][v][m];
          for (int t = 1; t < kTurns; ++t) sum = sum + acc[t][p][v][m];
          (Vec::load(total) + sum).store(total);
        }
      }
    }
  }
};

template <class VecType, class ElementType>
struct FloatStep {  // f32 activations; bf16 and f16 weights are widened in registers
  using Vec = VecType;
  using Element = ElementType;
  using Panel = typename Element::Storage;
  using Activation = float;
  static constexpr ActivationKind kKind = kActF32;
  static constexpr int64_t kStep = 4 / sizeof(Panel);

  template <int kTokens>
  static void run(const Panel* panel, const Activation* x, int64_t x_stride, Vec* acc) {
    if constexpr (kStep == 1) {
      const Vec weight = Vec::load(panel);
#pragma GCC unroll 16
      for (int m = 0; m < kTokens; ++m) acc[m] = fmadd(Vec::set(x[m * x_stride]), weight, acc[m]);
    } else {
      Vec even, odd;
      Element::load_pairs(panel, even, odd);
#pragma GCC unroll 16
      for (int m = 0; m < kTokens; ++m) {
        acc[m] = fmadd(Vec::set(x[m * x_stride]), even, acc[m]);
        acc[m] = fmadd(Vec::set(x[m * x_stride + 1]), odd, acc[m]);
      }
    }
  }
};

template <class VecType>
struct Bf16DotStep {  // bf16 activations, products summed by the dot instruction
  using Vec = VecType;
  using Panel = uint16_t;
  using Activation = uint16_t;
  static constexpr ActivationKind kKind = kActBf16;
  static constexpr int64_t kStep = 2;

  template <int kTokens>
  static void run(const Panel* panel, const Activation* x, int64_t x_stride, Vec* acc) {
#pragma GCC unroll 16
    for (int m = 0; m < kTokens; ++m) {
      uint32_t pair;
      __builtin_memcpy(&pair, x + m * x_stride, 4);
      acc[m] = dot_bf16_pairs(acc[m], panel, pair);
    }
  }
};

template <class Vec, class Element>
using FloatProduct = SteppedProduct<FloatStep<Vec, Element>>;

template <class Vec, bool kDot>
struct Bf16ProductOf {
  using Product = FloatProduct<Vec, Bf16>;
};
template <class Vec>
struct Bf16ProductOf<Vec, true> {
  using Product = SteppedProduct<Bf16DotStep<Vec>>;
};
template <class Vec>
using Bf16Product = typename Bf16ProductOf<Vec, Vec::kBf16Dot>::Product;

// Tokens whose sums are kept while a block of columns passes.
inline constexpr int64_t kTokenBlock = 128;

// Adds columns [begin, end) for `tokens` tokens, as many at once as the registers hold.
template <class Product, int kPanels, int kTokens>
inline void add_tiles(TileInput in, int64_t tokens, int64_t begin, int64_t end, float* totals) {
  for (; tokens >= kTokens; tokens -= kTokens) {
    Product::template add<kPanels, kTokens>(in, begin, end, totals);
    in.activation += kTokens * in.activation_bytes;
    totals += kTokens * kPanels * kPanelRows;
  }
  if constexpr (kTokens > 1) {
    constexpr int kFewer = kTokens > 8 ? 8 : kTokens > 4 ? 4 : kTokens / 2;
    if (tokens > 0) add_tiles<Product, kPanels, kFewer>(in, tokens, begin, end, totals);
  }
}

// finish(first token, tokens, totals[tokens][kPanels][16]) for all tokens of kPanels panels from
// `panel` on.
template <class Product, int kPanels, class Task, class Finish>
inline void panel_products(const Task& task, int64_t panel, const Finish& finish) {
  using Vec = typename Product::Vec;
  constexpr int kMost = kAccumulators<Vec> / (kPanels * (kPanelRows / Vec::kLanes));
  const int64_t panel_bytes = Product::panel_bytes(task.cols, task.group_size);
  TileInput in{static_cast<const char*>(task.packed) + panel * panel_bytes, panel_bytes,
               static_cast<const char*>(task.activation), task.activation_bytes};
  float totals[kTokenBlock * kPanels * kPanelRows];
  for (int64_t token = 0; token < task.tokens; token += kTokenBlock) {
    const int64_t left = task.tokens - token, tokens = left < kTokenBlock ? left : kTokenBlock;
    for (int64_t i = 0; i < tokens * kPanels * kPanelRows; ++i) totals[i] = 0.0f;
    for (int64_t begin = 0; begin < task.cols; begin += Product::kBlock) {
      const int64_t end = begin + Product::kBlock < task.cols ? begin + Product::kBlock : task.cols;
      add_tiles < Product, kPanels, kMost<1 ? 1 : kMost>(in, tokens, begin, end, totals);
    }
    finish(token, tokens, totals);
    in.activation += tokens * task.activation_bytes;
  }
}

// out[i] = x[i] for i < count, in the type of `out`.
template <class Vec>
inline void store_as(Vec x, ElementType type, void* out, int64_t at, int64_t count) {
  if (count <= 0) return;
  const auto store = [&](auto element) {
    using Element = decltype(element);
    auto* to = static_cast<typename Element::Storage*>(out) + at;
    if (count >= Vec::kLanes) {
      Element::store(x, to);
    } else {
      store_partial<Vec, Element>(x, to, count);
    }
  };
  switch (type) {
    case kBf16:
      return store(Bf16{});
    case kF16:
      return store(F16{});
    default:
      return store(F32{});
  }
}

template <class Vec>
inline Vec biased(const float* x, const float* bias, int64_t row) {
  return bias ? Vec::load(x) + Vec::load(bias + row) : Vec::load(x);
}

template <class Product, int kPanels>
inline void linear_panels(const LinearTask& task, int64_t panel) {
  using Vec = typename Product::Vec;
  panel_products<Product, kPanels>(
      task, panel, [&](int64_t token, int64_t tokens, const float* totals) {
        for (int64_t m = 0; m < tokens; ++m) {
          const int64_t out_row = (token + m) * task.out_stride;
          for (int64_t i = 0; i < kPanels * kPanelRows; i += Vec::kLanes) {
            const int64_t row = panel * kPanelRows + i;
            Vec sum = biased<Vec>(totals + m * kPanels * kPanelRows + i, task.bias, row);
            if (task.accumulate && row < task.rows) {
              const float* out = static_cast<const float*>(task.out) + out_row + row;
              sum = sum + load_up_to<Vec, F32>(out, task.rows - row);
            }
            store_as(sum, task.out_type, task.out, out_row + row, task.rows - row);
          }
        }
      });
}

// Few tokens: one panel, so one stream of weights. Many: two, so that an activation serves twice.
template <class Product>
void linear(const LinearTask& task) {
  int64_t panel = task.panel_begin;
  if (task.tokens > 8) {
    for (; panel + 2 <= task.panel_end; panel += 2) linear_panels<Product, 2>(task, panel);
  }
  for (; panel < task.panel_end; ++panel) linear_panels<Product, 1>(task, panel);
}

}  // namespace
}  // namespace fasttps::cpu
