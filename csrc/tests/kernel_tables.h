#pragma once
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "cpu/isa_list.h"

namespace fasttps::cpu {

// Runs a test once for every instruction set of the build; one that this CPU lacks is skipped by
// name.
class EveryIsa : public testing::TestWithParam<const KernelTable*> {
 protected:
  void SetUp() override {
    const uint32_t missing = missing_feature_bits(*GetParam());
    if (missing == 0) return;
    GTEST_SKIP() << GetParam()->isa << ": this CPU lacks "
                 << feature_name(static_cast<CpuFeature>(missing & -missing));
  }
  const KernelTable& kernels() const { return *GetParam(); }
};

inline std::string isa_name(const testing::TestParamInfo<const KernelTable*>& info) {
  return info.param->isa;
}

#define FASTTPS_EVERY_ISA(suite) \
  INSTANTIATE_TEST_SUITE_P(      \
      , suite, testing::ValuesIn(kernel_tables().begin(), kernel_tables().end()), isa_name)

// `count` normal deviates. Exactly as long as asked for, so that a sanitizer sees a read past it.
inline std::vector<float> normal(size_t count, uint32_t seed, float deviation = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution(0.0f, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(generator);
  return values;
}

// values in another type of the table, and as the f32 that they then hold.
struct Stored {
  std::vector<uint8_t> bytes;
  std::vector<float> values;
};

inline Stored store(const KernelTable& kernels, ElementType type,
                    const std::vector<float>& values) {
  const auto count = static_cast<int64_t>(values.size());
  Stored stored{std::vector<uint8_t>(values.size() * (type == kF32 ? 4 : 2)),
                std::vector<float>(values.size())};
  kernels.store_row[type](values.data(), 1.0f, stored.bytes.data(), count);
  kernels.load_row[type](stored.bytes.data(), stored.values.data(), count);
  return stored;
}

}  // namespace fasttps::cpu
