#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel_tables.h"

namespace fasttps::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class DecodeStepKernels : public EveryIsa {};

TEST_P(DecodeStepKernels, RmsNormMatchesFloat64) {
  for (const size_t count : {1, 7, 16, 33, 64, 577, 4096}) {
    const std::vector<float> x = normal(count, 21, 3.0f), weight = normal(count, 22);
    std::vector<float> out(count);
    kernels().rms_norm_row(x.data(), weight.data(), 1e-5f, static_cast<int64_t>(count), out.data());
    double square = 0.0;
    for (const float v : x) square += static_cast<double>(v) * v;
    const double scale = 1.0 / std::sqrt(square / static_cast<double>(count) + double{1e-5f});
    for (size_t i = 0; i < count; ++i) {
      const double exact = x[i] * scale * weight[i];
      // The sum's and the root's relative error, and two multiplications.
      EXPECT_NEAR(out[i], exact, 0x1p-21 * std::abs(exact)) << count << " at " << i;
    }
  }
}

TEST_P(DecodeStepKernels, RmsNormOfZerosIsZero) {
  const std::vector<float> x(5, 0.0f), weight(5, 2.0f);
  std::vector<float> out(5, 1.0f);
  kernels().rms_norm_row(x.data(), weight.data(), 1e-6f, 5, out.data());
  EXPECT_EQ(out, x);
}

TEST_P(DecodeStepKernels, ScaleRowMatchesFloat64) {
  for (const size_t count : {1, 7, 16, 33, 1000}) {
    for (const float softcap : {0.0f, 2.5f, 30.0f}) {
      const std::vector<float> x = normal(count, 24, 20.0f);
      std::vector<float> out = x;
      kernels().scale_row(out.data(), static_cast<int64_t>(count), 0.7f, softcap);
      for (size_t i = 0; i < count; ++i) {
        double exact = double{0.7f} * x[i];
        if (softcap > 0.0f) exact = softcap * std::tanh(exact / softcap);
        // Rounded factors, and tanh, which is 1 ulp off or 2.
        EXPECT_NEAR(out[i], exact, 0x1p-21 * std::abs(exact)) << count << " at " << i;
      }
    }
  }
}

TEST_P(DecodeStepKernels, ArgmaxIsTheFirstOfTheLargest) {
  for (const size_t count : {1, 5, 16, 1023, 1024, 1025, 5000}) {
    std::vector<float> x = normal(count, 23);
    const auto argmax = [&] { return kernels().argmax_f32(x.data(), static_cast<int64_t>(count)); };
    const auto largest = std::max_element(x.begin(), x.end()) - x.begin();
    EXPECT_EQ(argmax(), largest) << count;
    for (const size_t at : {size_t{0}, count / 2, count - 1}) {
      x[at] = 100.0f;
      x[count - 1] = 100.0f;
      EXPECT_EQ(argmax(), std::find(x.begin(), x.end(), 100.0f) - x.begin()) << count;
      x[at] = x[count - 1] = 0.0f;
    }
  }
}

TEST_P(DecodeStepKernels, ArgmaxOfWhatIsNotFinite) {
  std::vector<float> x(3000, -kInf);
  EXPECT_EQ(kernels().argmax_f32(x.data(), 3000), 0);
  x[2000] = -1e30f;
  EXPECT_EQ(kernels().argmax_f32(x.data(), 3000), 2000);
  x[2500] = kInf;
  x[2600] = kInf;
  EXPECT_EQ(kernels().argmax_f32(x.data(), 3000), 2500);
  x[2700] = kNaN;
  x[2999] = kNaN;
  EXPECT_EQ(kernels().argmax_f32(x.data(), 3000), 2700);
  x[0] = kNaN;
  EXPECT_EQ(kernels().argmax_f32(x.data(), 3000), 0);
}

FASTTPS_EVERY_ISA(DecodeStepKernels);

}  // namespace
}  // namespace fasttps::cpu
