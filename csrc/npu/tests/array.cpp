#include "npu/sim/array.h"

#include <gmock/gmock.h>

#include <numeric>

#include "npu/sim/event.h"

// Whole programs on an array whose times can be derived by hand: a cycle is a nanosecond, a stream
// moves 4 bytes in it and DRAM 16, nothing has a latency, and a copy takes 100 cycles however long.
namespace fasttps::npu::sim {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr Picoseconds kNs = 1000;
constexpr int64_t kElement = 400;  // bytes: 100 ns on a stream

Machine by_hand() {
  Machine machine{};
  machine.name = "by_hand";
  machine.columns = 4;
  machine.core_rows = 4;
  machine.clock_mhz = 1000;
  machine.shim.queue_depth = 4;
  machine.stream_bytes_per_cycle = 4;
  machine.dram_gb_per_s = 16;
  machine.dram_gb_per_s_per_channel = 4;
  machine.kernel_cycles = {{"copy", 100}};
  return machine;
}

Statement acquire(int fifo, Port port, int acquired) {
  return {Acquire{.fifo = fifo, .port = port, .acquired = acquired}};
}
Statement release(int fifo, Port port) { return {Release{.fifo = fifo, .port = port}}; }
Statement copy(int from, int to, int64_t bytes) {
  return {Call{"copy", {Held{from}, Held{to}, Expression(bytes)}}};
}

// L3 -> FIFO 0 -> core -> FIFO 1 -> L3, `count` elements.
Program through_a_core(int64_t count, int depth_in, int depth_out) {
  const Tile core{0, 2}, shim{0, 0};
  Program program;
  program.name = "through";
  program.arguments = {{"from", count * kElement, Access::kIn},
                       {"to", count * kElement, Access::kOut}};
  program.fifos = {{.name = "in",
                    .element_bytes = kElement,
                    .producer = {.tile = shim, .depth = 0},
                    .consumers = {{.tile = core, .depth = depth_in}}},
                   {.name = "out",
                    .element_bytes = kElement,
                    .producer = {.tile = core, .depth = depth_out},
                    .consumers = {{.tile = shim, .depth = 0}}}};
  Body body{acquire(0, Port::kConsume, 0), acquire(1, Port::kProduce, 1), copy(0, 1, kElement),
            release(0, Port::kConsume), release(1, Port::kProduce)};
  program.cores = {{.tile = core, .body = {{Loop{.index = 0, .count = count, .body = body}}}}};
  program.sequence = {Move{.name = "in", .argument = 0, .fifo = 0},
                      Move{.name = "out", .argument = 1, .fifo = 1}, Await{"out"}};
  return program;
}

struct Memory {
  explicit Memory(const Program& program) {
    for (const Argument& argument : program.arguments) {
      all.emplace_back(static_cast<size_t>(argument.bytes), std::byte{0xcd});
    }
    for (size_t i = 0; i < all[0].size(); ++i) all[0][i] = static_cast<std::byte>(i * 7 + i / 256);
    for (auto& one : all) spans.emplace_back(one);
  }
  std::vector<std::vector<std::byte>> all;
  std::vector<std::span<std::byte>> spans;
};

Statistics run(const Program& program, Memory& memory, const RunOptions& options = {},
               const std::vector<int64_t>& scalars = {}) {
  return run_on_array(program, by_hand(), memory.spans, scalars, options);
}

// In at 100, 200, 300, 400 ns, each copied in the 100 after, each out in the 100 after that.
TEST(Array, TwoDeepFifosOverlapMovesAndWork) {
  const Program program = through_a_core(4, 2, 2);
  Memory memory(program);
  const Statistics found = run(program, memory);
  EXPECT_EQ(found.duration, 600 * kNs);
  EXPECT_EQ(memory.all[1], memory.all[0]);
  EXPECT_EQ(found.l3_read_bytes, 4 * kElement);
  EXPECT_EQ(found.l3_written_bytes, 4 * kElement);
  EXPECT_EQ(found.l1_read_bytes, 4 * kElement);
  EXPECT_EQ(found.l1_written_bytes, 4 * kElement);
  EXPECT_EQ(found.cores[0].computing, 400 * kNs);
  EXPECT_EQ(found.cores[0].calls.at("copy"), 4);
  EXPECT_EQ(found.cores[0].stalled.at("in full"), 100 * kNs);
  EXPECT_EQ(found.fifos[0].sending, 400 * kNs);
}

// One deep, an element comes when the last one was copied: every 200, the last copied by 800.
TEST(Array, OneDeepFifosTakeTurns) {
  const Program program = through_a_core(4, 1, 2);
  Memory memory(program);
  EXPECT_EQ(run(program, memory).duration, 900 * kNs);
  EXPECT_EQ(memory.all[1], memory.all[0]);
}

TEST(Array, TimeIsTheSameWithoutData) {
  const Program program = through_a_core(4, 2, 2);
  Memory memory(program);
  RunOptions options;
  options.functional = false;
  const std::vector<std::span<std::byte>> nothing(2);
  EXPECT_EQ(run_on_array(program, by_hand(), nothing, {}, options).duration, 600 * kNs);
}

TEST(Array, WithoutItsAwaitACallReturnsBeforeItsData) {
  const Program program = through_a_core(4, 2, 2);
  Memory memory(program);
  RunOptions options;
  options.ignored_awaits = {"out"};
  EXPECT_EQ(run(program, memory, options).duration, 0);
  EXPECT_THAT(memory.all[1], Each(std::byte{0xcd}));
}

TEST(Array, ACoreThatWantsMoreThanThereIsDeadlocksByName) {
  Program program = through_a_core(4, 2, 2);
  program.cores[0].body = {{Acquire{.fifo = 0, .port = Port::kConsume, .count = 3}}};
  Memory memory(program);
  try {
    run(program, memory);
    FAIL() << "no deadlock";
  } catch (const Deadlock& error) {
    EXPECT_THAT(
        error.what(),
        AllOf(HasSubstr("core (0, 2) waits for a full element of in at (0, 2), which dma in"),
              HasSubstr("sequence waits for move out")));
  }
}

TEST(Array, MovesPastAnArgumentAreRefusedBeforeAnythingIsWritten) {
  Program program = through_a_core(4, 2, 2);
  std::get<Move>(program.sequence[1]).offset = Expression::scalar(0);
  std::get<Move>(program.sequence[1]).walk = {{kElement, 1}};
  Memory memory(program);
  try {
    run(program, memory, {}, {1});
    FAIL() << "no error";
  } catch (const std::out_of_range& error) {
    EXPECT_THAT(error.what(), HasSubstr("move out wanted bytes 0 to 1600 of to, got 4 to 1604"));
  }
  EXPECT_THAT(memory.all[1], Each(std::byte{0xcd}));
}

// L3 -> mem tile, distributed to two cores in halves, which copy them; joined again, in the other
// order, at the mem tile, and back.
Program in_halves(int64_t count) {
  const Tile shim{0, 0}, mem{0, 1}, cores[] = {{0, 2}, {0, 3}};
  constexpr int64_t kHalf = kElement / 2;
  Program program;
  program.name = "in_halves";
  program.arguments = {{"from", count * kElement, Access::kIn},
                       {"to", count * kElement, Access::kOut}};
  program.fifos.push_back({.name = "in",
                           .element_bytes = kElement,
                           .producer = {.tile = shim, .depth = 0},
                           .consumers = {{.tile = mem}}});
  program.fifos.push_back({.name = "out",
                           .element_bytes = kElement,
                           .producer = {.tile = mem},
                           .consumers = {{.tile = shim, .depth = 0}}});
  for (int i = 0; i < 2; ++i) {
    const int in = 2 + 2 * i, out = in + 1;
    program.fifos.push_back({.name = "in_" + std::to_string(i),
                             .element_bytes = kHalf,
                             .producer = {.tile = mem},
                             .consumers = {{.tile = cores[i]}}});
    program.fifos.push_back({.name = "out_" + std::to_string(i),
                             .element_bytes = kHalf,
                             .producer = {.tile = cores[i]},
                             .consumers = {{.tile = mem}}});
    Body body{acquire(in, Port::kConsume, 0), acquire(out, Port::kProduce, 1), copy(0, 1, kHalf),
              release(in, Port::kConsume), release(out, Port::kProduce)};
    program.cores.push_back(
        {.tile = cores[i], .body = {{Loop{.index = 0, .count = count, .body = body}}}});
  }
  program.links = {{.tile = mem, .inputs = {0}, .outputs = {2, 4}, .offsets_bytes = {0, kHalf}},
                   {.tile = mem, .inputs = {3, 5}, .outputs = {1}, .offsets_bytes = {kHalf, 0}}};
  program.sequence = {Move{.name = "in", .argument = 0, .fifo = 0},
                      Move{.name = "out", .argument = 1, .fifo = 1}, Await{"out"}};
  return program;
}

// An element: 100 ns in, 50 on to each core at once, 100 copied, 50 back, 100 out. The stages of
// 100 take turns, so three elements take 400 + 2 x 100.
TEST(Array, DistributesAndJoins) {
  const Program program = in_halves(3);
  Memory memory(program);
  const Statistics found = run(program, memory);
  EXPECT_EQ(found.duration, 600 * kNs);
  for (int64_t e = 0; e < 3; ++e) {
    for (int64_t i = 0; i < kElement; ++i) {
      const int64_t from = (i + kElement / 2) % kElement;
      ASSERT_EQ(memory.all[1][static_cast<size_t>(e * kElement + i)],
                memory.all[0][static_cast<size_t>(e * kElement + from)]);
    }
  }
  EXPECT_EQ(found.l2_written_bytes, 2 * 3 * kElement);
  EXPECT_EQ(found.l2_read_bytes, 2 * 3 * kElement);
  EXPECT_EQ(found.stream_bytes, 4 * 3 * kElement);
}

// A slow core (copies of 100, two for each element) holds up what is broadcast to a fast one: the
// third element comes when the slow one has released the first, at 100 + 200.
TEST(Array, ABroadcastWaitsForEveryConsumer) {
  const Tile cores[] = {{0, 2}, {1, 2}};
  Program program;
  program.name = "broadcast";
  program.arguments = {{"from", 4 * kElement, Access::kIn},
                       {"to_0", 4 * kElement, Access::kOut},
                       {"to_1", 4 * kElement, Access::kOut}};
  program.fifos = {{.name = "in",
                    .element_bytes = kElement,
                    .producer = {.tile = {0, 0}, .depth = 0},
                    .consumers = {{.tile = cores[0]}, {.tile = cores[1]}}}};
  program.sequence = {Move{.name = "in", .argument = 0, .fifo = 0}};
  for (int i = 0; i < 2; ++i) {
    const int out = 1 + i;
    const std::string name = "out_" + std::to_string(i);
    program.fifos.push_back({.name = name,
                             .element_bytes = kElement,
                             .producer = {.tile = cores[i]},
                             .consumers = {{.tile = {i, 0}, .depth = 0}}});
    Body body{acquire(0, Port::kConsume, 0), acquire(out, Port::kProduce, 1), copy(0, 1, kElement)};
    if (i == 1) body.push_back(copy(0, 1, kElement));
    body.push_back(release(0, Port::kConsume));
    body.push_back(release(out, Port::kProduce));
    program.cores.push_back(
        {.tile = cores[i], .body = {{Loop{.index = 0, .count = 4, .body = body}}}});
    program.sequence.push_back(Move{.name = name, .argument = 1 + i, .fifo = out});
  }
  program.sequence.insert(program.sequence.end(), {Await{"out_0"}, Await{"out_1"}});
  Memory memory(program);
  const Statistics found = run(program, memory);
  // Elements at 100, 200, then as the slow core releases at 300 and 500: 400 and 600 ns. The slow
  // core works without a pause from 100 on, and its last element is out 100 after 900.
  EXPECT_EQ(found.duration, 1000 * kNs);
  EXPECT_EQ(found.cores[0].stalled.at("in full"), (100 + 0 + 100 + 100) * kNs);
  EXPECT_EQ(memory.all[1], memory.all[0]);
  EXPECT_EQ(memory.all[2], memory.all[0]);
  // Sent once, received twice.
  EXPECT_EQ(found.l3_read_bytes, 4 * kElement);
  EXPECT_EQ(found.stream_bytes, (8 + 8) * kElement);
}

}  // namespace
}  // namespace fasttps::npu::sim
