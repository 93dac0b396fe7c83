#include "cpu/isa_list.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace fasttps::cpu {
namespace {

TEST(IsaList, EndsWithScalarWhichAlwaysRuns) {
  const KernelTable& last = *kernel_tables().back();
  EXPECT_STREQ(last.isa, "scalar");
  EXPECT_EQ(missing_feature_bits(last), 0u);
}

TEST(IsaList, NamesAreDistinct) {
  std::set<std::string> names;
  for (const KernelTable* table : kernel_tables()) names.insert(table->isa);
  EXPECT_EQ(names.size(), kernel_tables().size());
}

// Fastest first: each table needs all that the next one needs.
TEST(IsaList, EachTableNeedsWhatSlowerOnesNeed) {
  const auto tables = kernel_tables();
  for (size_t i = 1; i < tables.size(); ++i) {
    EXPECT_EQ(tables[i]->required_features & ~tables[i - 1]->required_features, 0u)
        << tables[i - 1]->isa << " and " << tables[i]->isa;
  }
}

TEST(IsaList, EveryRequiredFeatureHasAName) {
  for (const KernelTable* table : kernel_tables()) {
    for (uint32_t bits = table->required_features; bits != 0; bits &= bits - 1) {
      EXPECT_STRNE(feature_name(static_cast<CpuFeature>(bits & -bits)), "unknown") << table->isa;
    }
  }
}

}  // namespace
}  // namespace fasttps::cpu
