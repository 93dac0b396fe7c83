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

template <class Product>
void gate_up(const GateUpTask& task) {
  using Vec = typename Product::Vec;
  for (int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
    panel_products<Product, 2>(
        task, 2 * panel, [&](int64_t token, int64_t tokens, const float* totals) {
          for (int64_t m = 0; m < tokens; ++m) {
            const float* total = totals + m * 2 * kPanelRows;
            for (int64_t i = 0; i < kPanelRows; i += Vec::kLanes) {
              const int64_t row = panel * kPanelRows + i;
              const Vec gate = biased<Vec>(total + i, task.gate_bias, row);
              const Vec up = biased<Vec>(total + kPanelRows + i, task.up_bias, row);
              store_as(activate(gate, task.function) * up, task.out_type, task.out,
                       (token + m) * task.out_stride + row, task.rows - row);
            }
          }
        });
  }
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
