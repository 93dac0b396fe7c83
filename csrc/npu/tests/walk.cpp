#include "npu/sim/walk.h"

#include <gmock/gmock.h>

#include <array>
#include <numeric>

namespace fasttps::npu::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

std::vector<std::pair<int64_t, int64_t>> runs(const KnownWalk& walk, int64_t at, int64_t bytes) {
  std::vector<std::pair<int64_t, int64_t>> found;
  walk.visit(at, bytes, [&](int64_t offset, int64_t count) { found.emplace_back(offset, count); });
  return found;
}

TEST(Walk, WithoutDimensionsIsAllBytesInOrder) {
  const KnownWalk walk(8, {}, 4, 100);
  EXPECT_EQ(walk.bytes(), 100);
  EXPECT_EQ(walk.begin(), 8);
  EXPECT_EQ(walk.end(), 108);
  EXPECT_THAT(runs(walk, 10, 20), ElementsAre(Pair(18, 20)));
}

// Rows of 8 bytes, 32 apart, each two units of 4: a run is a row.
TEST(Walk, InnerStepsSideBySideAreOneRun) {
  const KnownWalk walk(0, {{3, 32}, {2, 4}}, 4, 0);
  EXPECT_EQ(walk.bytes(), 24);
  EXPECT_EQ(walk.end(), 72);
  EXPECT_THAT(runs(walk, 0, 24), ElementsAre(Pair(0, 8), Pair(32, 8), Pair(64, 8)));
  EXPECT_THAT(runs(walk, 4, 10), ElementsAre(Pair(4, 4), Pair(32, 6)));
}

// Columns of a 2 x 3 matrix of units of 4: 0 12, 4 16, 8 20.
TEST(Walk, TransposesAMatrix) {
  const KnownWalk walk(0, {{3, 4}, {2, 12}}, 4, 0);
  EXPECT_THAT(runs(walk, 0, 24), ElementsAre(Pair(0, 4), Pair(12, 4), Pair(4, 4), Pair(16, 4),
                                             Pair(8, 4), Pair(20, 4)));
}

TEST(Walk, GoesBackwardsAndStandsStill) {
  const KnownWalk back(8, {{3, -4}}, 4, 0);
  EXPECT_EQ(back.begin(), 0);
  EXPECT_EQ(back.end(), 12);
  EXPECT_THAT(runs(back, 0, 12), ElementsAre(Pair(8, 4), Pair(4, 4), Pair(0, 4)));
  const KnownWalk still(4, {{3, 0}, {1, 4}}, 4, 0);
  EXPECT_EQ(still.bytes(), 12);
  EXPECT_EQ(still.end(), 8);
}

TEST(Walk, OfNothingTouchesNothing) {
  const KnownWalk walk(100, {{0, 4}, {2, 4}}, 4, 0);
  EXPECT_EQ(walk.bytes(), 0);
  EXPECT_EQ(walk.begin(), 0);
  EXPECT_EQ(walk.end(), 0);
}

TEST(Walk, ScatterUndoesGather) {
  std::array<std::byte, 96> memory;
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i);
  const KnownWalk walk(0, {{2, 48}, {4, 4}, {3, 16}}, 4, 0);
  ASSERT_EQ(walk.bytes(), 96);
  std::array<std::byte, 96> stream, again{};
  walk.gather(memory.data(), 0, stream);
  EXPECT_EQ(stream[4], std::byte{16});
  walk.scatter(std::span(stream).first(40), 0, again.data());
  walk.scatter(std::span(stream).subspan(40), 40, again.data());
  EXPECT_EQ(again, memory);
}

}  // namespace
}  // namespace fasttps::npu::sim
