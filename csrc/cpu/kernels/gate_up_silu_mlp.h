// Included after Vec, math.h and element.h. Layout of the weights: pack_weight.h.
namespace fasttps::cpu {
namespace {

// How one weight type is multiplied. `step` adds kStep columns of one panel to kRows accumulators.
template <class VecType, class ElementType>
struct FloatProduct {  // f32 activations; bf16 and f16 weights are widened in registers
  using Vec = VecType;
  using Element = ElementType;
  using Panel = typename Element::Storage;
  using Activation = float;
  static constexpr int64_t kStep = 4 / sizeof(Panel);

  static void store(Vec x, Activation* to) { x.store(to); }
  static void prepare(const void* x, int64_t cols, Activation* to) {
    load_row<Vec, Element>(x, to, cols);
  }
  template <int kRows>
  static void step(const Panel* panel, const Activation* x, int64_t x_stride, Vec* acc) {
    if constexpr (kStep == 1) {
      const Vec weight = Vec::load(panel);
      for (int r = 0; r < kRows; ++r) acc[r] = fmadd(Vec::set(x[r * x_stride]), weight, acc[r]);
    } else {
      Vec even, odd;
      Element::load_pairs(panel, even, odd);
      for (int r = 0; r < kRows; ++r) {
        acc[r] = fmadd(Vec::set(x[r * x_stride]), even, acc[r]);
        acc[r] = fmadd(Vec::set(x[r * x_stride + 1]), odd, acc[r]);
      }
    }
  }
};

template <class VecType>
struct Bf16DotProduct {  // bf16 activations, products summed by the dot instruction
  using Vec = VecType;
  using Element = Bf16;
  using Panel = uint16_t;
  using Activation = uint16_t;
  static constexpr int64_t kStep = 2;

  static void store(Vec x, Activation* to) { x.store_bf16(to); }
  static void prepare(const void* x, int64_t cols, Activation* to) {
    __builtin_memcpy(to, x, static_cast<uint64_t>(cols) * sizeof(Activation));
  }
  template <int kRows>
  static void step(const Panel* panel, const Activation* x, int64_t x_stride, Vec* acc) {
    for (int r = 0; r < kRows; ++r) {
      uint32_t pair;
      __builtin_memcpy(&pair, x + r * x_stride, 4);
      acc[r] = dot_bf16_pairs(acc[r], panel, pair);
    }
  }
};

// total[p][r][i] = row i of panel p . x_r, for kPanels panels that follow each other and kRows
// tokens. Partial sums of kBlock columns are added up, so that the rounding error grows with
// kBlock + cols / kBlock rather than with cols.
template <class Product, int kRows, int kPanels>
inline void panel_dot(const typename Product::Panel* panels, int64_t cols,
                      const typename Product::Activation* x, int64_t x_stride,
                      float (&total)[kPanels][kRows][kPanelRows]) {
  using Vec = typename Product::Vec;
  constexpr int64_t kBlock = 128;
  constexpr int kVecs = kPanelRows / Vec::kLanes;
  constexpr int64_t kVecElements = Product::kStep * Vec::kLanes;
  for (int p = 0; p < kPanels; ++p) {
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kPanelRows; ++i) total[p][r][i] = 0.0f;
    }
  }
  for (int64_t block = 0; block < cols; block += kBlock) {
    const int64_t end = block + kBlock < cols ? block + kBlock : cols;
    Vec acc[kPanels][kVecs][kRows];
    for (int p = 0; p < kPanels; ++p) {
      for (int v = 0; v < kVecs; ++v) {
        for (int r = 0; r < kRows; ++r) acc[p][v][r] = Vec::set(0.0f);
      }
    }
    for (int64_t col = block; col < end; col += Product::kStep) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v) {
          const auto* panel = panels + (p * cols + col) * kPanelRows + v * kVecElements;
          Product::template step<kRows>(panel, x + col, x_stride, acc[p][v]);
        }
      }
    }
    for (int p = 0; p < kPanels; ++p) {
      for (int v = 0; v < kVecs; ++v) {
        for (int r = 0; r < kRows; ++r) {
          float* sum = total[p][r] + v * Vec::kLanes;
          (Vec::load(sum) + acc[p][v][r]).store(sum);
        }
      }
    }
  }
}

template <class Vec>
inline Vec activate(Vec x, Activation function) {
  const Vec one = Vec::set(1.0f), half = Vec::set(0.5f);
  switch (function) {
    case kGelu:  // x Phi(x)
      return half * x * (one + erf(x * Vec::set(0.70710678118654752f)));
    case kGeluTanh: {
      const Vec cubic = fmadd(Vec::set(0.044715f) * x * x, x, x);
      return half * x * (one + tanh(Vec::set(0.79788456080286536f) * cubic));
    }
    default:  // x / (1 + e^-x), whose limit at -inf is -0
      return x / (one + exp(-x));
  }
}

template <class Vec>
inline Vec biased(const float* x, const float* bias, int64_t row) {
  return bias ? Vec::load(x) + Vec::load(bias + row) : Vec::load(x);
}

template <class Product, int kRows>
void gate_up_rows(const GateUpTask& task, int64_t panel, int64_t token) {
  using Vec = typename Product::Vec;
  using Activation = typename Product::Activation;
  const auto* packed = static_cast<const typename Product::Panel*>(task.packed);
  const auto* x = static_cast<const Activation*>(task.activation) + token * task.cols;
  float total[2][kRows][kPanelRows];
  panel_dot<Product, kRows, 2>(packed + panel * 2 * kPanelRows * task.cols, task.cols, x, task.cols,
                               total);
  for (int r = 0; r < kRows; ++r) {
    Activation* h = static_cast<Activation*>(task.h) + (token + r) * task.h_stride;
    for (int64_t i = 0; i < kPanelRows; i += Vec::kLanes) {
      const int64_t row = panel * kPanelRows + i;
      const Vec gate = biased<Vec>(total[0][r] + i, task.gate_bias, row);
      const Vec up = biased<Vec>(total[1][r] + i, task.up_bias, row);
      Product::store(activate(gate, task.function) * up, h + row);
    }
  }
}

template <class Product, int kRows>
void down_rows(const DownTask& task, int64_t panel, int64_t token) {
  using Vec = typename Product::Vec;
  using Element = typename Product::Element;
  const auto* packed = static_cast<const typename Product::Panel*>(task.packed);
  const auto* h = static_cast<const typename Product::Activation*>(task.h) + token * task.h_stride;
  float total[1][kRows][kPanelRows];
  panel_dot<Product, kRows, 1>(packed + panel * kPanelRows * task.cols, task.cols, h, task.h_stride,
                               total);
  for (int r = 0; r < kRows; ++r) {
    auto* out = static_cast<typename Element::Storage*>(task.out) + (token + r) * task.rows;
    for (int64_t i = 0; i < kPanelRows; i += Vec::kLanes) {
      const int64_t row = panel * kPanelRows + i;
      const Vec y = biased<Vec>(total[0][r] + i, task.bias, row);
      if (row + Vec::kLanes <= task.rows) {
        Element::store(y, out + row);
      } else if (row < task.rows) {
        store_partial<Vec, Element>(y, out + row, task.rows - row);
      }
    }
  }
}

// rows<kRows>(panel, token) over all panels and tokens, as many tokens at once as the registers
// hold.
template <class Vec, class Task, class Rows>
inline void for_each_token_block(const Task& task, const Rows& rows) {
  constexpr int kMost = Vec::kLanes == 16 ? 8 : Vec::kLanes == 8 ? 2 : 1;
  for (int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
    int64_t token = 0;
    for (; token + kMost <= task.tokens; token += kMost) rows.template run<kMost>(panel, token);
    if constexpr (kMost == 8) {
      if (token + 4 <= task.tokens) {
        rows.template run<4>(panel, token);
        token += 4;
      }
      if (token + 2 <= task.tokens) {
        rows.template run<2>(panel, token);
        token += 2;
      }
    }
    if (token < task.tokens) rows.template run<1>(panel, token);
  }
}

template <class Product>
struct GateUpRows {
  const GateUpTask& task;
  template <int kRows>
  void run(int64_t panel, int64_t token) const {
    gate_up_rows<Product, kRows>(task, panel, token);
  }
};

template <class Product>
struct DownRows {
  const DownTask& task;
  template <int kRows>
  void run(int64_t panel, int64_t token) const {
    down_rows<Product, kRows>(task, panel, token);
  }
};

template <class Product>
void gate_up(const GateUpTask& task) {
  for_each_token_block<typename Product::Vec>(task, GateUpRows<Product>{task});
}

template <class Product>
void down(const DownTask& task) {
  for_each_token_block<typename Product::Vec>(task, DownRows<Product>{task});
}

template <class Product>
void prepare(const void* x, int64_t cols, int64_t cols_padded, void* activation) {
  auto* to = static_cast<typename Product::Activation*>(activation);
  Product::prepare(x, cols, to);
  for (int64_t i = cols; i < cols_padded; ++i) to[i] = 0;
}

template <class Product>
constexpr PackedLinearKernels packed_linear_kernels() {
  return {sizeof(typename Product::Activation), prepare<Product>, gate_up<Product>, down<Product>};
}

template <class Vec>
constexpr PackedLinearKernels bf16_linear_kernels() {
  if constexpr (Vec::kBf16Dot) {
    return packed_linear_kernels<Bf16DotProduct<Vec>>();
  } else {
    return packed_linear_kernels<FloatProduct<Vec, Bf16>>();
  }
}

}  // namespace
}  // namespace fasttps::cpu
