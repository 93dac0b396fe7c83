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

// EDX bits of CPUID leaf 7: 22 AMX-BF16, 24 AMX-TILE, 25 AMX-INT8. XCR0: 17 and 18 for tiles.
TEST(IsaList, AmxNeedsTilesThatTheSystemSaves) {
  constexpr uint32_t kAll = 1u << 22 | 1u << 24 | 1u << 25;
  constexpr uint64_t kAvx512 = 0xe7, kSaved = kAvx512 | 3u << 17;
  EXPECT_EQ(amx_features(kAll, kSaved), kAmxTileBit | kAmxBf16Bit | kAmxInt8Bit);
  EXPECT_EQ(amx_features(kAll, kAvx512), 0u);
  EXPECT_EQ(amx_features(kAll, kAvx512 | 1u << 17), 0u);
  EXPECT_EQ(amx_features(kAll & ~(1u << 24), kSaved), 0u);
  EXPECT_EQ(amx_features(kAll & ~(1u << 22), kSaved), kAmxTileBit | kAmxInt8Bit);
  EXPECT_EQ(amx_features(0, kSaved), 0u);
}

TEST(IsaList, OnlyAmxIsUnproven) {
  for (const KernelTable* table : kernel_tables()) {
    EXPECT_EQ(is_proven(*table), std::string(table->isa) != "avx512_amx") << table->isa;
  }
}

}  // namespace
}  // namespace fasttps::cpu
