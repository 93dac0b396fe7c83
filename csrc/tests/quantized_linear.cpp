#include <cmath>

#include "kernel_tables.h"

namespace fasttps::cpu {
namespace {

enum Format : int { kInt8Rows = 3, kInt4 = 4, kInt4Min = 5, kInt8Group = 6, kInt4Zero = 9 };

struct Shape {
  int format;
  int64_t group_size, group_bytes, group_cols;

  int64_t cols(int64_t of_weight) const {
    return (of_weight + group_cols - 1) / group_cols * group_cols;
  }
  int64_t panel_bytes(int64_t of_weight) const {
    return cols(of_weight) / group_cols * group_bytes + (format == kInt8Rows ? 64 : 0);
  }
};

const Shape kShapes[] = {
    {kInt8Rows, 0, 512, 32},   {kInt4, 32, 288, 32},    {kInt4, 64, 544, 64},
    {kInt4, 128, 1056, 128},   {kInt4Min, 32, 320, 32}, {kInt4Min, 128, 1088, 128},
    {kInt8Group, 32, 544, 32},
};
const Shape kZeroShapes[] = {{kInt4Zero, 32, 304, 32}, {kInt4Zero, 128, 1072, 128}};

// A rounded [rows, cols] weight, exactly as long as it must be, and its values by unpack_row.
struct Quantized {
  Shape shape;
  int64_t rows, cols;
  std::vector<uint8_t> bytes;
  std::vector<float> values;

  Quantized(const KernelTable& kernels, const Shape& s, int64_t r, int64_t c, uint32_t seed)
      : shape(s), rows(r), cols(c), values(static_cast<size_t>(r * c)) {
    const std::vector<float> weight = normal(static_cast<size_t>(rows * cols), seed, 0.1f);
    bytes.assign(static_cast<size_t>(panels() * shape.panel_bytes(cols)), 0xff);
    for (int64_t p = 0; p < panels(); ++p) {
      kernels.pack_panel[shape.format]({weight.data(), kF32, cols, rows, cols, shape.group_size, p,
                                        bytes.data() + p * shape.panel_bytes(cols)});
    }
    for (int64_t row = 0; row < rows; ++row) {
      kernels.unpack_row[shape.format](bytes.data(), cols, shape.group_size, row,
                                       values.data() + row * cols);
    }
    for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], weight[i], 0.1);
  }
  // Of kInt4Zero, from random quants, scales and zeros by columns.
  Quantized(const KernelTable& kernels, const Shape& s, int64_t r, int64_t c)
      : shape(s), rows(r), cols(c), values(static_cast<size_t>(r * c)) {
    const int64_t groups = shape.cols(cols) / shape.group_cols;
    std::vector<uint8_t> quants(static_cast<size_t>(rows * cols));
    std::vector<uint8_t> zeros(static_cast<size_t>(rows * groups));
    std::vector<uint16_t> scales(zeros.size());
    for (size_t i = 0; i < quants.size(); ++i) quants[i] = static_cast<uint8_t>(i * 7 % 16);
    for (size_t i = 0; i < zeros.size(); ++i) {
      zeros[i] = static_cast<uint8_t>(i % 17);
      scales[i] = static_cast<uint16_t>(0x2c00 + i % 1024);  // 1/16 to 1/8
    }
    bytes.assign(static_cast<size_t>(panels() * shape.panel_bytes(cols)), 0xff);
    for (int64_t p = 0; p < panels(); ++p) {
      kernels.pack_quants_panel[3]({quants.data(), 1, rows, rows, cols, shape.group_size,
                                    scales.data(), zeros.data(), p,
                                    bytes.data() + p * shape.panel_bytes(cols)});
    }
    for (int64_t row = 0; row < rows; ++row) {
      kernels.unpack_row[shape.format](bytes.data(), cols, shape.group_size, row,
                                       values.data() + row * cols);
      for (int64_t col = 0; col < cols; ++col) {
        const size_t at = static_cast<size_t>(row * groups + col / shape.group_cols);
        const float d = (1.0f + static_cast<float>(at % 1024) / 1024.0f) / 16.0f;
        const int q = quants[static_cast<size_t>(col * rows + row)];
        EXPECT_EQ(values[static_cast<size_t>(row * cols + col)],
                  d * static_cast<float>(q - zeros[at]));
      }
    }
  }
  int64_t panels() const { return (rows + kPanelRows - 1) / kPanelRows; }
};

// What int8 activations hold: round(x / s) * s by 32 columns, s = max |x| / 127.
std::vector<float> rounded(const std::vector<float>& x, int64_t cols) {
  std::vector<float> out(x.size());
  for (size_t row = 0; row < x.size(); row += static_cast<size_t>(cols)) {
    for (size_t begin = row; begin < row + static_cast<size_t>(cols); begin += 32) {
      const size_t end = std::min(begin + 32, row + static_cast<size_t>(cols));
      float largest = 0.0f;
      for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(x[i]));
      const float scale = largest / 127.0f;
      for (size_t i = begin; i < end; ++i) out[i] = std::nearbyint(x[i] / scale) * scale;
    }
  }
  return out;
}

class QuantizedLinear : public EveryIsa {
 protected:
  // Products with 1 to 121 tokens against float64 on the values.
  void check(const Quantized& weight) {
    const Shape& shape = weight.shape;
    const int64_t rows = weight.rows, cols = weight.cols;
    const int64_t cols_padded = shape.cols(cols);
    for (const int64_t tokens : {1, 3, 7, 13, 121}) {
      const std::vector<float> x = normal(static_cast<size_t>(tokens * cols), 4);
      for (const int int8_activation : {0, 1}) {
        const PackedLinearKernels& linear = kernels().packed_linear[shape.format][int8_activation];
        EXPECT_EQ(linear.kind, int8_activation == 1 ? kActInt8 : kActF32);
        const int64_t x_bytes = activation_row_bytes(linear.kind, cols_padded);
        std::vector<uint8_t> activation(static_cast<size_t>(tokens * x_bytes));
        for (int64_t m = 0; m < tokens; ++m) {
          kernels().prepare[linear.kind][kF32](x.data() + m * cols, cols, cols_padded,
                                               activation.data() + m * x_bytes);
        }
        const std::vector<float> met = int8_activation == 1 ? rounded(x, cols) : x;
        std::vector<float> out(static_cast<size_t>(tokens * rows), NAN);
        linear.linear({activation.data(), x_bytes, tokens, cols_padded, shape.group_size,
                       weight.bytes.data(), 0, weight.panels(), nullptr, false, out.data(), kF32,
                       rows, rows});
        for (int64_t m = 0; m < tokens; ++m) {
          for (int64_t i = 0; i < rows; ++i) {
            double y = 0.0, size = 0.0;
            for (int64_t k = 0; k < cols; ++k) {
              const double product =
                  double{weight.values[i * cols + k]} * double{met[m * cols + k]};
              y += product;
              size += std::abs(product);
            }
            EXPECT_NEAR(out[m * rows + i], y, 1e-6 * size)
                << "format " << shape.format << " group " << shape.group_size << " token " << m;
          }
        }
      }
    }
  }
};

TEST_P(QuantizedLinear, MatchesFloat64) {
  for (const Shape& shape : kShapes) check(Quantized(kernels(), shape, 40, 300, 3));
  for (const Shape& shape : kZeroShapes) check(Quantized(kernels(), shape, 40, 300));
}

TEST_P(QuantizedLinear, SumsOfInt8ActivationsAreExact) {
  // Every product at its end: with all weights at one level the sums are those of the activations.
  const int64_t cols = 64;
  const std::vector<float> weight(static_cast<size_t>(16 * cols), 1.0f);
  std::vector<uint8_t> packed(64 / 32 * 512 + 64);
  kernels().pack_panel[kInt8Rows]({weight.data(), kF32, cols, 16, cols, 0, 0, packed.data()});
  for (const float sign : {1.0f, -1.0f}) {
    const std::vector<float> x(static_cast<size_t>(cols), sign * 127.0f);
    std::vector<uint8_t> activation(static_cast<size_t>(activation_row_bytes(kActInt8, cols)));
    kernels().prepare[kActInt8][kF32](x.data(), cols, cols, activation.data());
    std::vector<float> out(16);
    kernels().packed_linear[kInt8Rows][1].linear(
        {activation.data(), activation_row_bytes(kActInt8, cols), 1, cols, 0, packed.data(), 0, 1,
         nullptr, false, out.data(), kF32, 16, 16});
    for (const float y : out) EXPECT_NEAR(y, sign * 127.0f * 64.0f, 1e-2);
  }
}

TEST_P(QuantizedLinear, InstructionSetsPackAlike) {
  for (const Shape& shape : kShapes) {
    const Quantized here(kernels(), shape, 20, 300, 5);
    const Quantized scalar(kScalarKernels, shape, 20, 300, 5);
    EXPECT_EQ(here.bytes, scalar.bytes) << "format " << shape.format;
  }
  for (const Shape& shape : kZeroShapes) {
    const Quantized here(kernels(), shape, 20, 300), scalar(kScalarKernels, shape, 20, 300);
    EXPECT_EQ(here.bytes, scalar.bytes) << "group " << shape.group_size;
  }
}

FASTTPS_EVERY_ISA(QuantizedLinear);

}  // namespace
}  // namespace fasttps::cpu
