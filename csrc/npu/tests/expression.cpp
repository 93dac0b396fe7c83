#include "npu/expression.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace fasttps::npu {
namespace {

const Expression kPosition = Expression::scalar(0);
const Expression kI = Expression::index(0);

int64_t value(const Expression& x, int64_t position = 0, int64_t i = 0) {
  const int64_t scalars[] = {position}, indices[] = {i};
  return x.value(scalars, indices);
}

TEST(Expression, SaysWhatFollowsFromAPosition) {
  const Expression blocks = ceil_div(kPosition + 1, 64);
  EXPECT_EQ(value(blocks, 0), 1);
  EXPECT_EQ(value(blocks, 63), 1);
  EXPECT_EQ(value(blocks, 64), 2);
  EXPECT_EQ(value(kPosition * 128 + kI * 4 - 3, 5, 7), 665);
  EXPECT_EQ(value(min(kI, 1), 0, 9), 1);
  EXPECT_EQ(value(max(kI, 10), 0, 9), 10);
}

TEST(Expression, DividesTowardsMinusInfinity) {
  const int64_t cases[][4] = {{7, 2, 3, 1}, {-7, 2, -4, 1}, {7, -2, -4, -1}, {-7, -2, 3, -1}};
  for (const auto& [a, b, quotient, rest] : cases) {
    EXPECT_EQ(value(floor_div(kPosition, b), a), quotient) << a << " / " << b;
    EXPECT_EQ(value(modulo(kPosition, b), a), rest) << a << " % " << b;
    EXPECT_EQ(floor_div(a, b).constant(), quotient);
  }
  EXPECT_THROW(value(floor_div(1, kPosition), 0), std::domain_error);
}

TEST(Expression, OfConstantsIsAConstant) {
  EXPECT_EQ((Expression(3) * 4 + 1).constant(), 13);
  EXPECT_TRUE((kPosition * 0).is_constant());
  EXPECT_FALSE((kPosition + 0).is_constant());
  EXPECT_EQ((kPosition * 1 + 0).op(), Expression::Op::kScalar);
  EXPECT_THROW(kPosition.constant(), std::logic_error);
}

TEST(Expression, WantsEveryValue) {
  EXPECT_THROW(Expression::scalar(1).value({}, {}), std::out_of_range);
  EXPECT_THROW(Expression::index(0).value({}, {}), std::out_of_range);
}

TEST(Expression, ReadsAsAPersonWritesIt) {
  const std::vector<std::string> names{"position"};
  EXPECT_EQ((kPosition * 128 + 64).text(names), "position * 128 + 64");
  EXPECT_EQ(((kPosition + 1) * 64).text(names), "(position + 1) * 64");
  EXPECT_EQ((kPosition - (kI - 1)).text(names), "position - (i0 - 1)");
  EXPECT_EQ(floor_div(kPosition, kI * 2).text(names), "position / (i0 * 2)");
  EXPECT_EQ(min(kPosition, 7).text(names), "min(position, 7)");
  EXPECT_EQ(kPosition.text({}), "s0");
}

}  // namespace
}  // namespace fasttps::npu
