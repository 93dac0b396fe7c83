// Included after Vec, math.h and element.h. Layout of the weights: pack_weight.h.
namespace fasttps::cpu {
namespace {

// Panels that lie panel_bytes apart, and tokens that lie activation_bytes apart.
struct TileInput {
  const char* panels;
  int64_t panel_bytes;
  const char* activation;
  int64_t activation_bytes;
  int64_t cols;
  int64_t group_size;
  bool fetch_ahead;  // these tokens are the first to meet the weights, which come from memory
};

// A product says how one format is multiplied with one kind of activation:
//   kKind        the kind
//   kBlock       columns whose products are summed before they are added to the total, so that the
//                rounding error grows with kBlock + cols / kBlock
//   panel_bytes  of so many columns
//   kMostTokens  tokens that the registers have room for, by panels
//   add<panels, tokens>
//                totals[token][panel][16] += columns [begin, end) . tokens; begin is a multiple of
//                kBlock; token_stride floats between tokens
// One that declares kTiled has, instead of the last two, add_all<panels> for any number of tokens.

// A strip is one vector of rows of a panel. Calls strips(panels, lane, totals) until all rows of
// kPanels panels had their turn: AVX-512 takes two panels at once, so that an activation that was
// spread over a register serves twice; shorter vectors have too few registers for that.
template <class Vec, int kPanels, class Strips>
inline void for_each_strip(const TileInput& in, float* totals, const Strips& strips) {
  if constexpr (Vec::kLanes == kPanelRows) {
    strips(in.panels, int64_t{0}, totals);
  } else {
    for (int p = 0; p < kPanels; ++p) {
      for (int64_t lane = 0; lane < kPanelRows; lane += Vec::kLanes) {
        strips(in.panels + p * in.panel_bytes, lane, totals + p * kPanelRows + lane);
      }
    }
  }
}
template <class Vec, int kPanels>
inline constexpr int kStrips = Vec::kLanes == kPanelRows ? kPanels : 1;

// How far ahead of its use a stream of weights is fetched.
inline constexpr int64_t kPrefetchBytes = 8192;

template <int64_t kBytes>
inline void prefetch(const void* p) {
  for (int64_t i = 0; i < kBytes; i += 64) {
    __builtin_prefetch(static_cast<const char*>(p) + kPrefetchBytes + i);
  }
}

// Sums of products of single columns or pairs of columns. A step has kStep columns: of the weights
// of one vector of rows (Weights), and of a token, spread over a register (Spread).
template <class Step>
struct SteppedProduct : Step {
  using Vec = typename Step::Vec;
  static constexpr int64_t kBlock = Step::kBlock;
  template <int kPanels>
  static constexpr int kMostTokens = Vec::kLanes == 16  ? (kPanels == 2 ? 12 : 4)
                                     : Vec::kLanes == 8 ? 8
                                                        : 2;

  static int64_t panel_bytes(int64_t cols, int64_t /*group_size*/) {
    return cols * kPanelRows * static_cast<int64_t>(sizeof(typename Step::Panel));
  }

  template <int kPanels, int kTokens>
  static void add(const TileInput& in, int64_t begin, int64_t end, float* totals,
                  int64_t token_stride) {
    constexpr int strips = kStrips<Vec, kPanels>;
    for_each_strip<Vec, kPanels>(in, totals, [&](const char* panel, int64_t lane, float* to) {
      add_strips<strips, kTokens>(in, panel, lane, begin, end, to, token_stride);
    });
  }

  template <int strips, int kTokens>
  static void add_strips(const TileInput& in, const char* panel, int64_t lane, int64_t begin,
                         int64_t end, float* totals, int64_t token_stride) {
    using Panel = typename Step::Panel;
    using Activation = typename Step::Activation;
    // Few sums at once depend on each other too closely: columns then go to several in turn.
    constexpr int kSums = strips * kTokens;
    constexpr int kTurns = kSums >= 8 ? 1 : 8 / kSums;
    const auto* weights = reinterpret_cast<const Panel*>(panel) + lane * Step::kStep;
    const auto* x = reinterpret_cast<const Activation*>(in.activation);
    const int64_t panel_elements = in.panel_bytes / static_cast<int64_t>(sizeof(Panel));
    const int64_t x_stride = in.activation_bytes / static_cast<int64_t>(sizeof(Activation));
    Vec acc[kTurns][strips][kTokens];
    for (auto& turn : acc) {
      for (auto& strip : turn) {
        for (Vec& sum : strip) sum = Vec::set(0.0f);
      }
    }
    const auto step = [&](int64_t col, auto& turn) {
      typename Step::Weights of_rows[strips];
      for (int s = 0; s < strips; ++s) {
        const Panel* at = weights + s * panel_elements + col * kPanelRows;
        if (in.fetch_ahead) prefetch<64>(at);
        of_rows[s] = Step::load(at);
      }
#pragma GCC unroll 16
      for (int m = 0; m < kTokens; ++m) {
        const typename Step::Spread of_token = Step::spread(x + col + m * x_stride);
        for (int s = 0; s < strips; ++s) {
          turn[s][m] = Step::multiply(of_token, of_rows[s], turn[s][m]);
        }
      }
    };
    int64_t col = begin;
    for (; col + kTurns * Step::kStep <= end; col += kTurns * Step::kStep) {
#pragma GCC unroll 8
      for (int t = 0; t < kTurns; ++t) step(col + t * Step::kStep, acc[t]);
    }
    for (; col < end; col += Step::kStep) step(col, acc[0]);
    for (int s = 0; s < strips; ++s) {
      for (int m = 0; m < kTokens; ++m) {
        float* total = totals + m * token_stride + s * kPanelRows;
        Vec sum = acc[0][s][m];
        for (int t = 1; t < kTurns; ++t) sum = sum + acc[t][s][m];
        (Vec::load(total) + sum).store(total);
      }
    }
  }
};

template <class VecType>
struct F32Step {
  using Vec = VecType;
  using Panel = float;
  using Activation = float;
  using Weights = Vec;
  using Spread = Vec;
  static constexpr ActivationKind kKind = kActF32;
  static constexpr int64_t kBlock = 128;
  static constexpr int64_t kStep = 1;

  static Weights load(const Panel* p) { return Vec::load(p); }
  static Spread spread(const Activation* x) { return Vec::set(*x); }
  static Vec multiply(Spread x, Weights w, Vec sum) { return fmadd(x, w, sum); }
};

template <class VecType, class Element>
struct WidenedStep {  // f32 activations; bf16 or f16 weights are widened in registers
  using Vec = VecType;
  using Panel = uint16_t;
  using Activation = float;
  struct Weights {
    Vec even, odd;
  };
  using Spread = Weights;
  static constexpr ActivationKind kKind = kActF32;
  static constexpr int64_t kBlock = 128;
  static constexpr int64_t kStep = 2;

  static Weights load(const Panel* p) {
    Weights w;
    Element::load_pairs(p, w.even, w.odd);
    return w;
  }
  static Spread spread(const Activation* x) { return {Vec::set(x[0]), Vec::set(x[1])}; }
  static Vec multiply(const Spread& x, const Weights& w, Vec sum) {
    return fmadd(x.odd, w.odd, fmadd(x.even, w.even, sum));
  }
};

template <class VecType>
struct Bf16DotStep {  // bf16 activations, products summed by the dot instruction
  using Vec = VecType;
  using Panel = uint16_t;
  using Activation = uint16_t;
  using Weights = typename Vec::Int;
  using Spread = typename Vec::Int;
  static constexpr ActivationKind kKind = kActBf16;
  static constexpr int64_t kBlock = 256;
  static constexpr int64_t kStep = 2;

  static Weights load(const Panel* p) { return Vec::Int::load(p); }
  static Spread spread(const Activation* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return Vec::Int::set(pair);
  }
  static Vec multiply(Spread x, Weights w, Vec sum) { return dot_bf16_pairs(sum, w, x); }
};

template <class Vec>
using F32Product = SteppedProduct<F32Step<Vec>>;
template <class Vec, class Element>
using WidenedProduct = SteppedProduct<WidenedStep<Vec, Element>>;

template <class Vec, bool kDot>
struct Bf16LinearOf {
  using Product = WidenedProduct<Vec, Bf16>;
};
template <class Vec>
struct Bf16LinearOf<Vec, true> {
  using Product = SteppedProduct<Bf16DotStep<Vec>>;
};
template <class Vec>
using Bf16Linear = typename Bf16LinearOf<Vec, Vec::kBf16Dot>::Product;

// Tokens whose sums are kept while a block of columns passes.
inline constexpr int64_t kTokenBlock = 120;  // a multiple of what registers hold

// Adds columns [begin, end) for `tokens` tokens, as many at once as the registers hold. The sums of
// tokens lie token_stride floats apart.
template <class Product, int kPanels, int kTokens>
inline void add_tiles(TileInput in, int64_t tokens, int64_t begin, int64_t end, float* totals,
                      int64_t token_stride) {
  // Eight are two tiles of four rather than a full one and a rest.
  for (; tokens >= kTokens && (tokens != 8 || kTokens <= 4); tokens -= kTokens) {
    Product::template add<kPanels, kTokens>(in, begin, end, totals, token_stride);
    in.activation += kTokens * in.activation_bytes;
    in.fetch_ahead = false;
    totals += kTokens * token_stride;
  }
  if constexpr (kTokens > 1) {
    constexpr int kFewer = kTokens > 4 ? 4 : kPanels == 2 ? 1 : kTokens / 2;
    if (tokens > 0) {
      add_tiles<Product, kPanels, kFewer>(in, tokens, begin, end, totals, token_stride);
    }
  }
}

template <class Product>
inline constexpr bool kIsTiled = requires { Product::kTiled; };

// All columns of kPanels panels, a block at a time.
template <class Product, int kPanels>
inline void add_columns(const TileInput& in, int64_t tokens, float* totals, int64_t token_stride) {
  for (int64_t begin = 0; begin < in.cols; begin += Product::kBlock) {
    const int64_t end = begin + Product::kBlock < in.cols ? begin + Product::kBlock : in.cols;
    if constexpr (kIsTiled<Product>) {
      Product::template add_all<kPanels>(in, tokens, begin, end, totals);
    } else {
      add_tiles<Product, kPanels, Product::template kMostTokens<kPanels>>(in, tokens, begin, end,
                                                                          totals, token_stride);
    }
  }
}

// For so few tokens memory is what limits, and one panel after the other, one stream of weights, is
// read faster than two at once. With more, an activation in a register serves two panels.
inline constexpr int64_t kFewTokens = 8;

// finish(first token, tokens, totals[tokens][kPanels][16]) for all tokens of kPanels panels from
// `panel` on.
template <class Product, int kPanels, class Task, class Finish>
inline void panel_products(const Task& task, int64_t panel, const Finish& finish) {
  constexpr int64_t kTokenStride = kPanels * kPanelRows;
  const int64_t panel_bytes = Product::panel_bytes(task.cols, task.group_size);
  TileInput in{static_cast<const char*>(task.packed) + panel * panel_bytes,
               panel_bytes,
               static_cast<const char*>(task.activation),
               task.activation_bytes,
               task.cols,
               task.group_size,
               true};
  float totals[kTokenBlock * kTokenStride];
  for (int64_t token = 0; token < task.tokens; token += kTokenBlock) {
    const int64_t left = task.tokens - token, tokens = left < kTokenBlock ? left : kTokenBlock;
    for (int64_t i = 0; i < tokens * kTokenStride; ++i) totals[i] = 0.0f;
    const bool one_by_one = kPanels > 1 && task.tokens <= kFewTokens;
    if constexpr (!kIsTiled<Product>) {
      TileInput one = in;
      for (int64_t p = 0; one_by_one && p < kPanels; ++p, one.panels += panel_bytes) {
        add_columns<Product, 1>(one, tokens, totals + p * kPanelRows, kTokenStride);
      }
    }
    if (!one_by_one) add_columns<Product, kPanels>(in, tokens, totals, kTokenStride);
    finish(token, tokens, totals);
    in.activation += tokens * task.activation_bytes;
    in.fetch_ahead = false;
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

template <class Product>
void linear(const LinearTask& task) {
  int64_t panel = task.panel_begin;
  if (task.tokens > kFewTokens) {
    for (; panel + 2 <= task.panel_end; panel += 2) linear_panels<Product, 2>(task, panel);
  }
  for (; panel < task.panel_end; ++panel) linear_panels<Product, 1>(task, panel);
}

}  // namespace
}  // namespace fasttps::cpu
