// Included after Vec, math.h and element.h. Layout of the weights: pack_weight.h.
namespace fasttps::cpu {
namespace {

// Panels that lie panel_stride bytes apart, and tokens that lie activation_bytes apart.
struct TileInput {
  const char* panels;
  int64_t panel_stride;
  const char* activation;
  int64_t activation_bytes;
  int64_t cols;
  int64_t group_size;
  unsigned fetch;  // bit p: these tokens are the first to meet panel p, which comes from memory
};

// A product says how one format is multiplied with one kind of activation:
//   kKind        the kind
//   kBlock       columns whose products are summed before they are added to the total, so that the
//                rounding error grows with kBlock + cols / kBlock
//   panel_bytes  of so many columns
//   kMostTokens  tokens that the registers have room for, by panels
//   kFewTokens   tokens for which one panel after the other is faster than two at once
//   add<panels, tokens>
//                totals[token][panel][16] += columns [begin, end) . tokens; begin is a multiple of
//                kBlock; token_stride floats between tokens
// One that declares kTiled has, instead of the last two, add_all<panels> for any number of tokens.

// A strip is one vector of rows of a panel. Calls strips(panel, lane, totals) until all rows of
// kPanels panels had their turn: AVX-512 takes two panels at once, so that an activation that was
// spread over a register serves twice; shorter vectors have too few registers for that.
template <class Vec, int kPanels, class Strips>
inline void for_each_strip(float* totals, const Strips& strips) {
  if constexpr (Vec::kLanes == kPanelRows) {
    strips(0, int64_t{0}, totals);
  } else {
    for (int p = 0; p < kPanels; ++p) {
      for (int64_t lane = 0; lane < kPanelRows; lane += Vec::kLanes) {
        strips(p, lane, totals + p * kPanelRows + lane);
      }
    }
  }
}
template <class Vec, int kPanels>
inline constexpr int kStrips = Vec::kLanes == kPanelRows ? kPanels : 1;

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// How far ahead of its use a stream of weights is fetched.
inline constexpr int64_t kPrefetchBytes = 8192;

// kOnce: read once, so that it need not stay in the outer caches; a stream of 8 bits a weight or
// more is then read up to a tenth faster, one of 4 bits no faster. Inlined always: gcc takes a
// function that only prefetches for one without effects, and drops its calls.
template <int64_t kBytes, bool kOnce>
[[gnu::always_inline]] inline void fetch_ahead(const void* at) {
  const char* next = static_cast<const char*>(at) + kPrefetchBytes;
  for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(next + i, 0, kOnce ? 0 : 3);
}

// Which of the strips from `panel` on are to be fetched ahead; read before the loops, so that each
// has its own where nothing is.
template <int strips>
struct Fetch {
  bool strip[strips];

  Fetch(const TileInput& in, int panel, int64_t lane) {
    for (int s = 0; s < strips; ++s) strip[s] = lane == 0 && (in.fetch >> (panel + s) & 1) != 0;
  }
};

// Sums of products of single columns or pairs of columns. A step has kStep columns: of the weights
// of one vector of rows (Weights), and of a token, spread over a register (Spread).
template <class Step>
struct SteppedProduct : Step {
  using Vec = typename Step::Vec;
  static constexpr int64_t kBlock = Step::kBlock;
  static constexpr int kFewTokens = 4;
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
    for_each_strip<Vec, kPanels>(totals, [&](int panel, int64_t lane, float* to) {
      add_strips<strips, kTokens>(in, panel, lane, begin, end, to, token_stride);
    });
  }

  template <int strips, int kTokens>
  static void add_strips(const TileInput& in, int panel, int64_t lane, int64_t begin, int64_t end,
                         float* totals, int64_t token_stride) {
    using Panel = typename Step::Panel;
    using Activation = typename Step::Activation;
    // Few sums at once depend on each other too closely: columns then go to several in turn.
    constexpr int kSums = strips * kTokens;
    constexpr int kTurns = kSums >= 8 ? 1 : 8 / kSums;
    const auto* weights =
        reinterpret_cast<const Panel*>(in.panels + panel * in.panel_stride) + lane * Step::kStep;
    const auto* x = reinterpret_cast<const Activation*>(in.activation);
    const int64_t panel_elements = in.panel_stride / static_cast<int64_t>(sizeof(Panel));
    const int64_t x_stride = in.activation_bytes / static_cast<int64_t>(sizeof(Activation));
    const Fetch<strips> fetch(in, panel, 0);  // 64 bytes a step, whatever the lane
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
        if (fetch.strip[s]) fetch_ahead<64, kTokens <= kFewTokens>(at);
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

// With few tokens (Product::kFewTokens) memory is what limits, and one panel after the other, one
// stream of weights, is read faster than two at once. With more, an activation in a register serves
// two panels.
inline constexpr int64_t kMostFewTokens = 4;  // of any product

// add<kPanels, tokens> of columns [begin, end), for kLeast <= tokens <= kMost.
template <class Product, int kPanels, int kLeast, int kMost>
inline void add_tile(const TileInput& in, int64_t tokens, int64_t begin, int64_t end, float* totals,
                     int64_t token_stride) {
  if constexpr (kLeast < kMost) {
    if (tokens < kMost) {
      return add_tile<Product, kPanels, kLeast, kMost - 1>(in, tokens, begin, end, totals,
                                                           token_stride);
    }
  }
  Product::template add<kPanels, kMost>(in, begin, end, totals, token_stride);
}

// Adds columns [begin, end) for `tokens` tokens, in as few tiles of tokens as the registers allow
// and of as equal a size. The sums of tokens lie token_stride floats apart.
template <class Product, int kPanels>
inline void add_tiles(TileInput in, int64_t tokens, int64_t begin, int64_t end, float* totals,
                      int64_t token_stride) {
  constexpr int kMost = Product::template kMostTokens<kPanels>;
  // More than kFewTokens meet two panels, and a tile of several has at least half of kMost.
  constexpr int kPairs = Product::kFewTokens + 1;
  constexpr int kLeast = kPanels == 1 ? 1 : kMost / 2 < kPairs ? kMost / 2 : kPairs;
  const int64_t tiles = (tokens + kMost - 1) / kMost;
  const unsigned fetch = in.fetch;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    // Two tiles share the fetching, so that memory is never idle.
    if (tiles > 1) in.fetch = tile < kPanels ? fetch & 1u << tile : 0;
    const int64_t now = (tokens + tile) / tiles;
    add_tile<Product, kPanels, kLeast, kMost>(in, now, begin, end, totals, token_stride);
    in.activation += now * in.activation_bytes;
    totals += now * token_stride;
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
      add_tiles<Product, kPanels>(in, tokens, begin, end, totals, token_stride);
    }
  }
}

// totals[token][kPanels][16] = panels `panel`, panel + step, ... . tokens [token, token + tokens).
template <class Product, int kPanels, class Task>
inline void panel_products(const Task& task, int64_t panel, int64_t step, int64_t token,
                           int64_t tokens, float* totals) {
  constexpr int64_t kTokenStride = kPanels * kPanelRows;
  const int64_t panel_bytes = Product::panel_bytes(task.cols, task.group_size);
  const TileInput in{static_cast<const char*>(task.packed) + panel * panel_bytes,
                     step * panel_bytes,
                     static_cast<const char*>(task.activation) + token * task.activation_bytes,
                     task.activation_bytes,
                     task.cols,
                     task.group_size,
                     token == 0 ? (1u << kPanels) - 1 : 0};
  for (int64_t i = 0; i < tokens * kTokenStride; ++i) totals[i] = 0.0f;
  add_columns<Product, kPanels>(in, tokens, totals, kTokenStride);
}

// run(first token, tokens) for blocks of tokens, of which none is of few if there are more.
template <class Run>
inline void for_token_blocks(int64_t tokens, const Run& run) {
  for (int64_t token = 0; token < tokens;) {
    const int64_t left = tokens - token;
    const int64_t now = left <= kTokenBlock + kMostFewTokens ? left : kTokenBlock;
    run(token, now);
    token += now;
  }
}

// run(Constant<2>, i, step) for pairs i, i + step of [begin, end), and run(Constant<1>, i, 0) for
// what is left: for few tokens all, else the last of an odd number. Pairs are taken from both
// halves of the range, so that each thread reads two contiguous streams.
template <class Run>
inline void for_pairs(int64_t few_tokens, int64_t begin, int64_t end, int64_t tokens,
                      const Run& run) {
  if (tokens > few_tokens) {
    const int64_t step = (end - begin) / 2;
    for (int64_t i = begin; i < begin + step; ++i) run(Constant<2>{}, i, step);
    begin += 2 * step;
  }
  for (; begin < end; ++begin) run(Constant<1>{}, begin, int64_t{0});
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

// Panels `panel` and, of two, panel + step.
template <class Product, int kPanels>
inline void linear_panels(const LinearTask& task, int64_t panel, int64_t step) {
  using Vec = typename Product::Vec;
  float totals[(kTokenBlock + kMostFewTokens) * kPanels * kPanelRows];
  for_token_blocks(task.tokens, [&](int64_t token, int64_t tokens) {
    panel_products<Product, kPanels>(task, panel, step, token, tokens, totals);
    for (int64_t m = 0; m < tokens; ++m) {
      const int64_t out_row = (token + m) * task.out_stride;
      for (int64_t p = 0; p < kPanels; ++p) {
        for (int64_t i = 0; i < kPanelRows; i += Vec::kLanes) {
          const int64_t row = (panel + p * step) * kPanelRows + i;
          const float* total = totals + (m * kPanels + p) * kPanelRows + i;
          Vec sum = biased<Vec>(total, task.bias, row);
          if (task.accumulate && row < task.rows) {
            const float* out = static_cast<const float*>(task.out) + out_row + row;
            sum = sum + load_up_to<Vec, F32>(out, task.rows - row);
          }
          store_as(sum, task.out_type, task.out, out_row + row, task.rows - row);
        }
      }
    }
  });
}

template <class Product>
void linear(const LinearTask& task) {
  for_pairs(Product::kFewTokens, task.panel_begin, task.panel_end, task.tokens,
            [&](auto panels, int64_t panel, int64_t step) {
              linear_panels<Product, decltype(panels)::value>(task, panel, step);
            });
}

}  // namespace
}  // namespace fasttps::cpu
