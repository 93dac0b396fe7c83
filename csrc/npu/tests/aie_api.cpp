#define __AIE_ARCH__ 21
#define AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16
#include <gtest/gtest.h>

#include <aie_api/aie.hpp>

namespace {

struct Mode {
  aie::rounding_mode old;
  explicit Mode(aie::rounding_mode mode) : old(aie::swap_rounding(mode)) {}
  ~Mode() { aie::set_rounding(old); }
};
uint16_t bits(aie::rounding_mode mode, uint32_t f32) {
  const Mode m(mode);
  return bfloat16(std::bit_cast<float>(f32)).bits;
}

TEST(AieApi, RoundsToBf16ByMode) {
  using R = aie::rounding_mode;
  // 1 + half of the last bit: between 0x3f80 and 0x3f81; and its negative.
  EXPECT_EQ(bits(R::floor, 0x3f808000), 0x3f80);
  EXPECT_EQ(bits(R::floor, 0xbf808000), 0xbf81);
  EXPECT_EQ(bits(R::ceil, 0x3f808000), 0x3f81);
  EXPECT_EQ(bits(R::ceil, 0xbf808000), 0xbf80);
  EXPECT_EQ(bits(R::positive_inf, 0xbf808000), 0xbf80);
  EXPECT_EQ(bits(R::negative_inf, 0x3f808000), 0x3f80);
  EXPECT_EQ(bits(R::symmetric_inf, 0xbf808000), 0xbf81);
  EXPECT_EQ(bits(R::symmetric_zero, 0xbf808000), 0xbf80);
  EXPECT_EQ(bits(R::conv_even, 0x3f808000), 0x3f80);
  EXPECT_EQ(bits(R::conv_even, 0x3f818000), 0x3f82);
  EXPECT_EQ(bits(R::conv_odd, 0x3f808000), 0x3f81);
  EXPECT_EQ(bits(R::conv_odd, 0x3f818000), 0x3f81);
  EXPECT_EQ(bits(R::conv_even, 0x3f808001), 0x3f81);
  EXPECT_EQ(bits(R::conv_even, 0x7f800000), 0x7f80);
  EXPECT_EQ(bits(R::conv_even, 0x7f800001), 0x7fc0);
}

TEST(AieApi, SaturatesByMode) {
  aie::accum<acc32, 2> a;
  a.lanes[0] = 300;
  a.lanes[1] = -300;
  aie::set_saturation(aie::saturation_mode::saturate);
  EXPECT_EQ(a.to_vector<int8>().get(0), 127);
  EXPECT_EQ(a.to_vector<int8>().get(1), -128);
  aie::set_saturation(aie::saturation_mode::symmetric);
  EXPECT_EQ(a.to_vector<int8>().get(1), -127);
  aie::set_saturation(aie::saturation_mode::none);
  EXPECT_EQ(a.to_vector<int8>().get(0), 44);  // 300 - 256
  EXPECT_EQ(a.to_vector<int8>(2).get(0), 75);
}

TEST(AieApi, OneOutlierOfABfp16BlockCostsItsNeighbours) {
  const Mode even(aie::rounding_mode::conv_even);
  float x[8] = {64, 1.25, 0.5, 1.5, -0.75, 0, 0.25, 2};  // units of 1
  aie::round_to_bfp16(x);
  const float wanted[8] = {64, 1, 0, 2, -1, 0, 0, 2};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(x[i], wanted[i]) << i;
}

TEST(AieApi, LinearExp2IsALineBetweenPowersOfTwo) {
  aie::current_exp2 = aie::host_exp2::linear;
  const auto y = aie::exp2<bfloat16>(aie::broadcast<float, 16>(-0.5f));
  aie::current_exp2 = aie::host_exp2::rounded;
  EXPECT_EQ(float(y.get(0)), 0.75f);
}

}  // namespace
