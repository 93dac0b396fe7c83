#include "cpu/bf16_choice.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>

namespace fasttps::cpu {
namespace {

const CpuModel kZen4{"AuthenticAMD", 25, 17}, kZen5{"AuthenticAMD", 26, 2};
const CpuModel kEmeraldRapids{"GenuineIntel", 6, 207};
const CpuModel kNewIntel{"GenuineIntel", 6, 255}, kNewAmd{"AuthenticAMD", 27, 0};
const CpuModel kOther{"SomeoneElse", 1, 1};
const char kNoFile[] = "/nowhere/at/all";

// A file of `fasttps tune`, removed at the end.
class TunedFile {
 public:
  explicit TunedFile(const std::string& text)
      : path_(testing::TempDir() + "bf16_product_" + std::to_string(getpid())) {
    std::ofstream(path_) << text;
  }
  ~TunedFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string refusal(const CpuModel& cpu, bool has_dpbf16, const char* forced,
                    const std::string& tuned = kNoFile) {
  try {
    choose_bf16_product(cpu, has_dpbf16, forced, tuned);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(Bf16Choice, ComesFromTheTableForMeasuredCpus) {
  for (const CpuModel& cpu : {kZen4, kZen5}) {
    const Bf16Choice choice = choose_bf16_product(cpu, true, nullptr, kNoFile);
    EXPECT_EQ(choice.product, Bf16Product::kDpbf16);
    EXPECT_TRUE(choice.known);
  }
  const Bf16Choice choice = choose_bf16_product(kEmeraldRapids, true, "", kNoFile);
  EXPECT_EQ(choice.product, Bf16Product::kFma);
  EXPECT_EQ(choice.origin, "measured on Emerald Rapids");
}

TEST(Bf16Choice, IsAGuessForOthers) {
  for (const CpuModel& cpu : {kNewIntel, kNewAmd, kOther}) {
    const Bf16Choice choice = choose_bf16_product(cpu, true, nullptr, kNoFile);
    EXPECT_FALSE(choice.known);
    EXPECT_EQ(choice.product == Bf16Product::kFma, cpu.vendor == "GenuineIntel");
  }
}

TEST(Bf16Choice, IsFmaWithoutTheInstruction) {
  const TunedFile tuned("AuthenticAMD 25 17 dpbf16\n");
  const Bf16Choice choice = choose_bf16_product(kZen4, false, nullptr, tuned.path());
  EXPECT_EQ(choice.product, Bf16Product::kFma);
  EXPECT_EQ(choice.origin, "this CPU lacks avx512_bf16");
}

TEST(Bf16Choice, ForcedGoesFirst) {
  const TunedFile tuned("AuthenticAMD 26 2 dpbf16\n");
  const Bf16Choice choice = choose_bf16_product(kZen5, true, "fma", tuned.path());
  EXPECT_EQ(choice.product, Bf16Product::kFma);
  EXPECT_EQ(choice.origin, "FASTTPS_BF16_GEMM");
  EXPECT_EQ(choose_bf16_product(kEmeraldRapids, true, "dpbf16", kNoFile).product,
            Bf16Product::kDpbf16);
}

TEST(Bf16Choice, ForcingWhatCannotRunIsAnError) {
  EXPECT_EQ(refusal(kZen5, true, "amx"), "FASTTPS_BF16_GEMM: this CPU runs dpbf16, fma; got 'amx'");
  EXPECT_EQ(refusal(kZen5, false, "dpbf16"), "FASTTPS_BF16_GEMM: this CPU runs fma; got 'dpbf16'");
}

TEST(Bf16Choice, TunedGoesBeforeTheTableAndOnlyForItsCpu) {
  const TunedFile tuned(
      "# a comment\n\nGenuineIntel 6 255 dpbf16\nAuthenticAMD 26 2 fma  # another\n");
  const Bf16Choice zen5 = choose_bf16_product(kZen5, true, nullptr, tuned.path());
  EXPECT_EQ(zen5.product, Bf16Product::kFma);
  EXPECT_EQ(zen5.origin, tuned.path());
  EXPECT_EQ(choose_bf16_product(kNewIntel, true, nullptr, tuned.path()).product,
            Bf16Product::kDpbf16);
  EXPECT_EQ(choose_bf16_product(kZen4, true, nullptr, tuned.path()).origin, "measured on Zen 4");
}

TEST(Bf16Choice, ABrokenFileIsAnErrorThatNamesTheLine) {
  for (const char* broken : {"AuthenticAMD 26 2 maybe", "AuthenticAMD 26 fma", "AuthenticAMD",
                             "AuthenticAMD 26 2 fma fma"}) {
    const TunedFile tuned(std::string("# one\n") + broken + "\n");
    const std::string message = refusal(kZen4, true, nullptr, tuned.path());
    EXPECT_NE(message.find(tuned.path() + ", line 2: wanted"), std::string::npos) << message;
    EXPECT_NE(message.find(broken), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace fasttps::cpu
