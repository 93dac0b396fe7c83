#include "npu/kernel_list.h"

#include <gtest/gtest.h>

namespace fasttps::npu {
namespace {

// Memory is null: counts come from numbers alone.
std::vector<KernelValue> numbers(const Kernel& k, std::vector<int64_t> given) {
  std::vector<KernelValue> out;
  size_t next = 0;
  for (ArgumentKind kind : k.arguments) {
    KernelValue value{.memory = nullptr};
    if (kind == ArgumentKind::kNumber) value.number = given.at(next++);
    out.push_back(value);
  }
  EXPECT_EQ(next, given.size());
  return out;
}

TEST(KernelList, CountsWorkOfShapesByHand) {
  const Kernel& gemv = kernel("gemv");
  EXPECT_EQ(gemv.work(numbers(gemv, {32, 576, 1})).bf16_macs, 18432);
  const Kernel& int4 = kernel("gemv_int4");
  // 2 rows of 64 in groups of 32: 64 bytes, 4 scales, 4 zero points.
  EXPECT_EQ(int4.memory_bytes(numbers(int4, {2, 64, 32, 1, 1}))[0], 64 + 8 + 8);
  EXPECT_EQ(int4.memory_bytes(numbers(int4, {2, 64, 32, 0, 1}))[0], 64 + 8);
  // head_dim, row and column block, tokens, offset, scale: on the diagonal, above it, behind 64
  // more tokens, in the padding.
  const Kernel& scores = kernel("steel_scores");
  EXPECT_EQ(scores.work(numbers(scores, {64, 1, 1, 128, 0, 0})).bf16_macs, 64 * 64 * 64);
  EXPECT_EQ(scores.work(numbers(scores, {64, 0, 1, 128, 0, 0})).bf16_macs, 0);
  EXPECT_EQ(scores.work(numbers(scores, {64, 0, 1, 128, 64, 0})).bf16_macs, 64 * 64 * 64);
  EXPECT_EQ(scores.work(numbers(scores, {64, 2, 1, 128, 0, 0})).bf16_macs, 0);
}

TEST(KernelList, CyclesAreTheLargestOfUnitsUnlessMeasured) {
  Machine machine{};
  machine.core.bf16_macs_per_cycle = 128;
  machine.core.int8_macs_per_cycle = 256;
  machine.core.vector_lanes = 32;
  machine.core.exp_lanes = 16;
  machine.core.call_cycles = 20;
  const Kernel& gemv = kernel("gemv");
  EXPECT_EQ(kernel_cycles(machine, gemv, numbers(gemv, {32, 576, 1})), 20 + 144);
  const Kernel& copy = kernel("copy");
  EXPECT_EQ(kernel_cycles(machine, copy, numbers(copy, {65})), 20 + 2);
  machine.kernel_cycles["gemv"] = 7;
  EXPECT_EQ(kernel_cycles(machine, gemv, numbers(gemv, {32, 576, 1})), 7);
  // What was measured is a block with work; one that is skipped costs its call.
  machine.kernel_cycles["steel_scores"] = 7088;
  const Kernel& scores = kernel("steel_scores");
  EXPECT_EQ(kernel_cycles(machine, scores, numbers(scores, {64, 1, 1, 128, 0, 0})), 7088);
  EXPECT_EQ(kernel_cycles(machine, scores, numbers(scores, {64, 0, 1, 128, 0, 0})), 20);
}

TEST(KernelList, RefusesUnknownNamesAndWrongCalls) {
  EXPECT_THROW(kernel("nope"), std::invalid_argument);
  EXPECT_THROW(kernel("gemv").run({}, {}), std::invalid_argument);
  const Kernel& copy = kernel("copy");
  EXPECT_THROW(copy.run({Generation::kAie2, true}, numbers(copy, {0})), std::invalid_argument);
  for (const std::string& name : kernel_names()) EXPECT_EQ(kernel(name).name, name);
}

}  // namespace
}  // namespace fasttps::npu
