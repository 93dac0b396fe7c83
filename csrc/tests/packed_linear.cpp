#include <cmath>
#include <limits>

#include "cpu/panel_split.h"
#include "kernel_tables.h"

namespace fasttps::cpu {
namespace {

int64_t rounded_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// A [rows, cols] weight in one type, packed panel by panel behind each other.
struct Packed {
  ElementType type;
  int64_t rows, cols, cols_padded;
  Stored weight;
  std::vector<uint8_t> bytes;

  Packed(const KernelTable& kernels, ElementType t, int64_t r, int64_t c, uint32_t seed)
      : type(t), rows(r), cols(c), cols_padded(t == kF32 ? c : rounded_up(c, 2)) {
    weight = store(kernels, type, normal(static_cast<size_t>(rows * cols), seed));
    bytes.assign(static_cast<size_t>(panels() * panel_bytes()), 0xff);
    for (int64_t p = 0; p < panels(); ++p) {
      kernels.pack_panel[type](
          {weight.bytes.data(), type, cols, rows, cols, 0, p, bytes.data() + p * panel_bytes()});
    }
  }
  int64_t panels() const { return rounded_up(rows, kPanelRows) / kPanelRows; }
  int64_t panel_bytes() const { return kPanelRows * cols_padded * (type == kF32 ? 4 : 2); }
  double at(int64_t row, int64_t col) const { return weight.values[row * cols + col]; }
};

// Gate and up panels alternating.
std::vector<uint8_t> interleave(const Packed& gate, const Packed& up) {
  std::vector<uint8_t> both;
  for (int64_t p = 0; p < gate.panels(); ++p) {
    for (const Packed* half : {&gate, &up}) {
      const uint8_t* panel = half->bytes.data() + p * half->panel_bytes();
      both.insert(both.end(), panel, panel + half->panel_bytes());
    }
  }
  return both;
}

class PackedLinear : public EveryIsa {};

TEST_P(PackedLinear, UnpacksWhatWasPacked) {
  for (const ElementType type : {kF32, kBf16, kF16}) {
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{1, 1}, {16, 2}, {17, 33}, {40, 7}}) {
      const Packed packed(kernels(), type, rows, cols, 5);
      std::vector<uint8_t> back(packed.weight.bytes.size());
      for (int64_t p = 0; p < packed.panels(); ++p) {
        kernels().unpack_panel[type == kF32 ? 0 : 1](packed.bytes.data() + p * packed.panel_bytes(),
                                                     rows, cols, p, back.data(), cols);
      }
      EXPECT_EQ(back, packed.weight.bytes) << rows << " x " << cols << ", type " << type;
    }
  }
}

TEST_P(PackedLinear, PutsPairsOfColumnsOf16RowsTogether) {
  const Packed packed(kernels(), kBf16, 18, 3, 6);
  const auto* bits = reinterpret_cast<const uint16_t*>(packed.bytes.data());
  const auto* rows = reinterpret_cast<const uint16_t*>(packed.weight.bytes.data());
  EXPECT_EQ(bits[0], rows[0]);        // row 0, column 0
  EXPECT_EQ(bits[1], rows[1]);        // row 0, column 1
  EXPECT_EQ(bits[2], rows[3]);        // row 1, column 0
  EXPECT_EQ(bits[32], rows[2]);       // row 0, column 2
  EXPECT_EQ(bits[33], 0);             // past the last column
  EXPECT_EQ(bits[64], rows[16 * 3]);  // row 16 opens the second panel
  EXPECT_EQ(bits[64 + 2 * 2], 0);     // past the last row
}

TEST_P(PackedLinear, GateUpAndDownMatchFloat64) {
  const int64_t hidden = 45, intermediate = 37, tokens = 11;
  for (const ElementType type : {kF32, kBf16, kF16}) {
    const Packed gate(kernels(), type, intermediate, hidden, 7);
    const Packed up(kernels(), type, intermediate, hidden, 8);
    const Packed down(kernels(), type, hidden, intermediate, 9);
    const std::vector<uint8_t> gate_up = interleave(gate, up);
    const Stored x = store(kernels(), type, normal(static_cast<size_t>(tokens * hidden), 10, 0.1f));
    const PackedLinearKernels& linear = kernels().packed_linear[type][0];

    const size_t element = type == kF32 ? 4 : 2;
    const int64_t x_bytes = activation_row_bytes(linear.kind, gate.cols_padded);
    std::vector<uint8_t> activation(static_cast<size_t>(tokens * x_bytes));
    for (int64_t m = 0; m < tokens; ++m) {
      kernels().prepare[linear.kind][type](x.bytes.data() + m * hidden * element, hidden,
                                           gate.cols_padded, activation.data() + m * x_bytes);
    }
    const int64_t h_stride = rounded_up(intermediate, kPanelRows);
    const int64_t h_bytes = activation_row_bytes(linear.kind, h_stride);
    std::vector<uint8_t> h(static_cast<size_t>(tokens * h_bytes));
    linear.gate_up({activation.data(), x_bytes, tokens, gate.cols_padded, 0, gate_up.data(), 0,
                    gate.panels(), nullptr, nullptr, kSilu, h.data(),
                    linear.kind == kActBf16 ? kBf16 : kF32, h_stride, h_stride});
    std::vector<float> bias(static_cast<size_t>(rounded_up(hidden, kPanelRows)), 0.25f);
    std::vector<uint8_t> out(static_cast<size_t>(tokens * hidden) * element);
    linear.linear({h.data(), h_bytes, tokens, down.cols_padded, 0, down.bytes.data(), 0,
                   down.panels(), bias.data(), false, out.data(), type, hidden, hidden});

    std::vector<float> got(static_cast<size_t>(tokens * hidden));
    kernels().load_row[type](out.data(), got.data(), tokens * hidden);
    for (int64_t m = 0; m < tokens; ++m) {
      std::vector<double> inner(static_cast<size_t>(intermediate));
      for (int64_t i = 0; i < intermediate; ++i) {
        double g = 0.0, u = 0.0;
        for (int64_t k = 0; k < hidden; ++k) {
          g += gate.at(i, k) * x.values[m * hidden + k];
          u += up.at(i, k) * x.values[m * hidden + k];
        }
        inner[i] = g / (1.0 + std::exp(-g)) * u;
      }
      for (int64_t j = 0; j < hidden; ++j) {
        double y = 0.25, size = 0.0;
        for (int64_t i = 0; i < intermediate; ++i) {
          y += down.at(j, i) * inner[i];
          size += std::abs(down.at(j, i) * inner[i]);
        }
        // One rounding of each intermediate and one of the output to the type's precision.
        const double unit = type == kF32 ? 0x1p-20 : type == kBf16 ? 0x1p-8 : 0x1p-11;
        EXPECT_NEAR(got[m * hidden + j], y, unit * (size + std::abs(y))) << "type " << type;
      }
    }
  }
}

TEST_P(PackedLinear, AddsToWhatIsThere) {
  const int64_t rows = 21, cols = 33, tokens = 3, stride = 40;
  const Packed weight(kernels(), kF32, rows, cols, 12);
  const std::vector<float> x = normal(static_cast<size_t>(tokens * cols), 13);
  const std::vector<float> before = normal(static_cast<size_t>(tokens * stride), 14);
  std::vector<float> out = before;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{1, 2}, {0, 1}}) {
    kernels().packed_linear[kF32][0].linear({x.data(), cols * 4, tokens, cols, 0,
                                             weight.bytes.data(), begin, end, nullptr, true,
                                             out.data(), kF32, stride, rows});
  }
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t i = 0; i < stride; ++i) {
      double y = before[m * stride + i];
      for (int64_t k = 0; i < rows && k < cols; ++k) y += weight.at(i, k) * x[m * cols + k];
      EXPECT_NEAR(out[m * stride + i], y, 1e-5) << m << ", " << i;
    }
  }
}

TEST_P(PackedLinear, UnpacksOneRow) {
  for (const ElementType type : {kF32, kBf16, kF16}) {
    const Packed packed(kernels(), type, 18, 7, 15);
    for (const int64_t row : {0, 15, 17}) {
      std::vector<float> got(7);
      kernels().unpack_row[type](packed.bytes.data(), 7, 0, row, got.data());
      for (int64_t col = 0; col < 7; ++col) EXPECT_EQ(got[col], packed.at(row, col));
    }
  }
}

TEST(PanelRange, CoversAllPanelsOnce) {
  for (const int64_t panels : {1, 2, 7, 512, 513}) {
    for (int64_t parts = 1; parts <= panels && parts < 9; ++parts) {
      int64_t next = 0;
      for (int64_t part = 0; part < parts; ++part) {
        const PanelRange range = panel_range(panels, part, parts);
        EXPECT_EQ(range.begin, next);
        EXPECT_GE(range.end - range.begin, panels / parts);
        EXPECT_LE(range.end - range.begin, panels / parts + 1);
        next = range.end;
      }
      EXPECT_EQ(next, panels);
    }
  }
  EXPECT_EQ(panel_parts(512, 65536, 4), 4);
  EXPECT_EQ(panel_parts(3, 65536, 4), 3);
  EXPECT_EQ(panel_parts(4, 1024, 4), 1);
  EXPECT_EQ(panel_parts(0, 1024, 4), 0);
}

FASTTPS_EVERY_ISA(PackedLinear);

class QuantizeRow : public EveryIsa {};

TEST_P(QuantizeRow, RoundsToTheNearestStepOfItsScale) {
  for (const int64_t count : {1, 7, 16, 20, 129}) {
    const std::vector<float> x = normal(static_cast<size_t>(count), 11);
    std::vector<int8_t> q(x.size());
    float scale = 0.0f, largest = 0.0f;
    kernels().quantize_row(x.data(), q.data(), &scale, count);
    for (const float value : x) largest = std::max(largest, std::abs(value));
    EXPECT_EQ(scale, largest / 127.0f);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(q[i], static_cast<int8_t>(std::nearbyint(x[i] / scale))) << i;
    }
  }
}

TEST_P(QuantizeRow, KeepsZerosAndShowsWhatIsNotFinite) {
  std::vector<int8_t> q(3, 1);
  float scale = 1.0f;
  kernels().quantize_row(std::vector<float>(3, 0.0f).data(), q.data(), &scale, 3);
  EXPECT_EQ(scale, 0.0f);
  EXPECT_EQ(q, std::vector<int8_t>(3, 0));
  for (const float bad : {NAN, INFINITY}) {
    kernels().quantize_row(std::vector<float>{1.0f, bad, 2.0f}.data(), q.data(), &scale, 3);
    EXPECT_TRUE(std::isnan(scale * static_cast<float>(q[1])));
  }
}

TEST_P(QuantizeRow, KeepsTheSignsOfARowWhoseScaleIsSubnormal) {
  const float step = std::numeric_limits<float>::denorm_min();
  for (const float largest : {190.0f * step, 1e-42f, 1e-40f}) {  // 190: rounds to one step
    const std::vector<float> x{largest, -largest, 0.5f * largest, 0.0f};
    std::vector<int8_t> q(x.size());
    float scale = 0.0f;
    kernels().quantize_row(x.data(), q.data(), &scale, 4);
    EXPECT_GE(q[0], 64);
    EXPECT_EQ(q[1], -q[0]);
    EXPECT_GT(q[2], 0);
    EXPECT_EQ(q[3], 0);
  }
}

FASTTPS_EVERY_ISA(QuantizeRow);

}  // namespace
}  // namespace fasttps::cpu
