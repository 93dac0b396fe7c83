#include <cmath>
#include <cstring>
#include <limits>

#include "kernel_tables.h"

namespace fasttps::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class Math : public EveryIsa {};

using Function = void (*)(const float*, float*, int64_t);

// Distance in units of the last place of the exact value; the least subnormal below 2^-126.
double ulps(float got, double exact) {
  if (std::isinf(got) && std::abs(exact) > std::numeric_limits<float>::max()) return 0.0;
  const int exponent = std::max(std::ilogb(exact == 0.0 ? 1e-300 : exact), -126);
  return std::abs(static_cast<double>(got) - exact) / std::ldexp(1.0, exponent - 23);
}

// Largest error over evenly spaced arguments, called with an odd count for the tail.
double largest_error(Function function, double (*exact)(double), float from, float to) {
  const int count = 200001;
  std::vector<float> x(count), y(count);
  for (int i = 0; i < count; ++i) {
    x[i] = from + (to - from) * static_cast<float>(i) / static_cast<float>(count - 1);
  }
  function(x.data(), y.data(), count);
  double worst = 0.0;
  for (int i = 0; i < count; ++i) worst = std::max(worst, ulps(y[i], exact(x[i])));
  return worst;
}

double one(Function function, float x) {
  float y;
  function(&x, &y, 1);
  return y;
}

TEST_P(Math, ExpIsWithinTwoUlps) {
  EXPECT_LT(largest_error(kernels().exp_f32, std::exp, -104.0f, 89.0f), 2.0);
  EXPECT_LT(largest_error(kernels().exp_f32, std::exp, -1.0f, 1.0f), 2.0);
}

TEST_P(Math, Exp2IsWithinTwoUlps) {
  EXPECT_LT(largest_error(kernels().exp2_f32, std::exp2, -150.0f, 128.5f), 2.0);
  EXPECT_LT(largest_error(kernels().exp2_f32, std::exp2, -1.0f, 1.0f), 2.0);
}

TEST_P(Math, TanhIsWithinThreeUlps) {
  EXPECT_LT(largest_error(kernels().tanh_f32, std::tanh, -12.0f, 12.0f), 3.0);
  EXPECT_LT(largest_error(kernels().tanh_f32, std::tanh, -0.7f, 0.7f), 3.0);
}

TEST_P(Math, ErfIsWithinThreeUlps) {
  EXPECT_LT(largest_error(kernels().erf_f32, std::erf, -5.0f, 5.0f), 3.0);
  EXPECT_LT(largest_error(kernels().erf_f32, std::erf, -1.0f, 1.0f), 3.0);
}

TEST_P(Math, LimitsAreExact) {
  for (const Function function : {kernels().exp_f32, kernels().exp2_f32}) {
    EXPECT_EQ(one(function, 0.0f), 1.0);
    EXPECT_EQ(one(function, -kInf), 0.0);
    EXPECT_EQ(one(function, -1e30f), 0.0);
    EXPECT_EQ(one(function, kInf), kInf);
    EXPECT_EQ(one(function, 1e30f), kInf);
  }
  for (const Function function : {kernels().tanh_f32, kernels().erf_f32}) {
    EXPECT_EQ(one(function, 0.0f), 0.0);
    EXPECT_EQ(one(function, kInf), 1.0);
    EXPECT_EQ(one(function, -kInf), -1.0);
  }
}

TEST_P(Math, NaNStaysNaN) {
  for (const Function function :
       {kernels().exp_f32, kernels().exp2_f32, kernels().tanh_f32, kernels().erf_f32}) {
    EXPECT_TRUE(std::isnan(one(function, kNaN)));
  }
}

FASTTPS_EVERY_ISA(Math);

class Conversion : public EveryIsa {};

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The nearest value of a 16-bit type, found among all of them; of two the one with an even last
// bit.
class Nearest {
 public:
  Nearest(const KernelTable& kernels, ElementType type) {
    std::vector<uint16_t> bits(1 << 16);
    for (uint32_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
    values_.resize(bits.size());
    kernels.load_row[type](bits.data(), values_.data(), 1 << 16);
  }
  const std::vector<float>& values() const { return values_; }
  uint16_t operator()(float x) const {  // finite, positive, below infinity
    uint32_t low = 0, high = 0x7fff;    // ascending up to infinity, NaNs beyond
    while (high > 0 && std::isnan(values_[high])) --high;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (values_[middle] <= x ? low : high) = middle;
    }
    const double below = x - static_cast<double>(values_[low]);
    // Infinity stands where the next finite value would.
    const double next = std::isinf(values_[high])
                            ? 2.0 * values_[low] - static_cast<double>(values_[low - 1])
                            : values_[high];
    const double above = next - x;
    if (below != above) return static_cast<uint16_t>(below < above ? low : high);
    return static_cast<uint16_t>(low % 2 == 0 ? low : high);
  }

 private:
  std::vector<float> values_;
};

TEST_P(Conversion, EveryHalfSurvivesTheWayToFloatAndBack) {
  for (const ElementType type : {kBf16, kF16}) {
    const Nearest nearest(kernels(), type);
    std::vector<uint16_t> back(1 << 16);
    kernels().store_row[type](nearest.values().data(), 1.0f, back.data(), 1 << 16);
    for (uint32_t bits = 0; bits < back.size(); ++bits) {
      if (std::isnan(nearest.values()[bits])) {
        float again;
        kernels().load_row[type](&back[bits], &again, 1);
        EXPECT_TRUE(std::isnan(again)) << bits;
      } else {
        EXPECT_EQ(back[bits], bits) << "type " << type;
      }
    }
  }
}

TEST_P(Conversion, RoundsToNearestTiesToEven) {
  std::mt19937 generator(0);
  for (const ElementType type : {kBf16, kF16}) {
    const Nearest nearest(kernels(), type);
    std::vector<float> x;
    for (int i = 0; i < 20000; ++i) x.push_back(from_bits(generator() & 0x7f7fffff));
    for (int i = 0; i < 20000; ++i) x.push_back(std::ldexp(1.0f + i / 20000.0f, i % 45 - 28));
    for (uint32_t i = 0; i + 1 < 0x7c00; i += 7) {  // exactly between two neighbours
      x.push_back(0.5f * nearest.values()[i] + 0.5f * nearest.values()[i + 1]);
    }
    std::vector<uint16_t> got(x.size());
    kernels().store_row[type](x.data(), 1.0f, got.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(got[i], nearest(x[i])) << "type " << type << ", " << x[i];
    }
  }
}

TEST_P(Conversion, RowsOfEveryLengthStayWithinTheirEnds) {
  for (int64_t count = 0; count <= 35; ++count) {
    for (const ElementType type : {kF32, kBf16, kF16}) {
      const Stored stored = store(kernels(), type, normal(static_cast<size_t>(count), 3));
      EXPECT_EQ(stored.values.size(), static_cast<size_t>(count));
    }
  }
}

FASTTPS_EVERY_ISA(Conversion);

}  // namespace
}  // namespace fasttps::cpu
