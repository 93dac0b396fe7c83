// Included after packed_linear.h. The first half of a gated MLP; the second is a linear.
namespace fasttps::cpu {
namespace {

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

// Rows of panel `panel` and, of two, panel + step: of out, so that the packed ones are twice as
// many.
template <class Product, int kPanels>
inline void gate_up_panels(const GateUpTask& task, int64_t panel, int64_t step) {
  using Vec = typename Product::Vec;
  constexpr int64_t kTotals = (kTokenBlock + kMostFewTokens) * kPanels * kPanelRows;
  float gates[kTotals], ups[kTotals];
  for_token_blocks(task.tokens, [&](int64_t token, int64_t tokens) {
    panel_products<Product, kPanels>(task, 2 * panel, 2 * step, token, tokens, gates);
    panel_products<Product, kPanels>(task, 2 * panel + 1, 2 * step, token, tokens, ups);
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t p = 0; p < kPanels; ++p) {
        for (int64_t i = 0; i < kPanelRows; i += Vec::kLanes) {
          const int64_t row = (panel + p * step) * kPanelRows + i;
          const int64_t at = (m * kPanels + p) * kPanelRows + i;
          const Vec gate = biased<Vec>(gates + at, task.gate_bias, row);
          const Vec up = biased<Vec>(ups + at, task.up_bias, row);
          store_as(activate(gate, task.function) * up, task.out_type, task.out,
                   (token + m) * task.out_stride + row, task.rows - row);
        }
      }
    }
  });
}

template <class Product>
void gate_up(const GateUpTask& task) {
  for_pairs(Product::kFewTokens, task.panel_begin, task.panel_end, task.tokens,
            [&](auto panels, int64_t panel, int64_t step) {
              gate_up_panels<Product, decltype(panels)::value>(task, panel, step);
            });
}

template <class Product>
constexpr PackedLinearKernels packed_linear_kernels() {
  return {Product::kKind, linear<Product>, gate_up<Product>};
}

template <class Product>
constexpr PackedLinearRow float_linear_kernels() {
  return {{packed_linear_kernels<Product>(), packed_linear_kernels<Product>()}};
}

template <class Vec, class Weight>
constexpr PackedLinearRow quantized_linear_kernels() {
  return {{packed_linear_kernels<DequantizedProduct<Vec, Weight>>(),
           packed_linear_kernels<Int8Product<Vec, Weight>>()}};
}

}  // namespace
}  // namespace fasttps::cpu
