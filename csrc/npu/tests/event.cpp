#include "npu/sim/event.h"

#include <gmock/gmock.h>

#include "npu/sim/shared_pipe.h"

// Times are derived by hand beside each.
namespace fasttps::npu::sim {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Log = std::vector<std::pair<int, Picoseconds>>;

Process sleep(Simulation& simulation, Picoseconds duration, int name, Log& log) {
  co_await simulation.delay(duration);
  log.emplace_back(name, simulation.now());
}

TEST(Simulation, EventsHappenInTheOrderOfTimeAndThenAsTheyWereMade) {
  Simulation simulation;
  Log log;
  simulation.start("b", sleep(simulation, 20, 1, log));
  simulation.start("a", sleep(simulation, 10, 2, log));
  simulation.start("c", sleep(simulation, 20, 3, log));
  simulation.run();
  EXPECT_THAT(log, ElementsAre(std::pair{2, 10}, std::pair{1, 20}, std::pair{3, 20}));
}

TEST(Simulation, WhatAProcessThrowsComesOutOfRun) {
  const auto fail = [](Simulation& simulation) -> Process {
    co_await simulation.delay(1);
    throw std::out_of_range("a move");
  };
  Simulation simulation;
  simulation.start("one", fail(simulation));
  EXPECT_THROW(simulation.run(), std::out_of_range);
}

// A producer that makes one every 10 ps, a consumer that takes 25 ps for each, two places: it makes
// at 10 and 20; its third place is free when the consumer is done with the first, at 10 + 25; the
// consumer is never without work, so it ends at 10 + 3 x 25.
TEST(Semaphore, TwoPlacesLetAProducerBeAheadByTwo) {
  const auto produce = [](Simulation& simulation, Semaphore& free, Semaphore& full,
                          Log& log) -> Process {
    for (int i = 0; i < 3; ++i) {
      co_await free.take(1);
      co_await simulation.delay(10);
      full.give(1);
      log.emplace_back(i, simulation.now());
    }
  };
  const auto consume = [](Simulation& simulation, Semaphore& free, Semaphore& full,
                          Log& log) -> Process {
    for (int i = 0; i < 3; ++i) {
      co_await full.take(1);
      co_await simulation.delay(25);
      free.give(1);
      log.emplace_back(10 + i, simulation.now());
    }
  };
  Simulation simulation;
  Semaphore free(simulation, 2, "free"), full(simulation, 0, "full");
  Log log;
  simulation.start("producer", produce(simulation, free, full, log));
  simulation.start("consumer", consume(simulation, free, full, log));
  simulation.run();
  EXPECT_THAT(log, ElementsAre(std::pair{0, 10}, std::pair{1, 20}, std::pair{10, 35},
                               std::pair{2, 45}, std::pair{11, 60}, std::pair{12, 85}));
}

TEST(Semaphore, WhoCameFirstIsServedFirstThoughALaterOneWantsLess) {
  const auto take = [](Simulation& simulation, Semaphore& of, int count, Log& log) -> Process {
    co_await of.take(count);
    log.emplace_back(count, simulation.now());
  };
  const auto give = [](Simulation& simulation, Semaphore& of) -> Process {
    for (int i = 0; i < 4; ++i) {
      co_await simulation.delay(10);
      of.give(1);
    }
  };
  Simulation simulation;
  Semaphore semaphore(simulation, 0, "units");
  Log log;
  simulation.start("three", take(simulation, semaphore, 3, log));
  simulation.start("one", take(simulation, semaphore, 1, log));
  simulation.start("giver", give(simulation, semaphore));
  simulation.run();
  EXPECT_THAT(log, ElementsAre(std::pair{3, 30}, std::pair{1, 40}));
}

TEST(Deadlock, NamesWhoWaitsForWhat) {
  const auto take = [](Semaphore& of) -> Process { co_await of.take(1); };
  Simulation simulation;
  Semaphore q(simulation, 0, "a full element of Q"), k(simulation, 0, "a full element of K");
  simulation.start("core (0, 2)", take(q));
  simulation.start("core (1, 2)", take(k));
  try {
    simulation.run();
    FAIL() << "no deadlock";
  } catch (const Deadlock& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("core (0, 2) waits for a full element of Q"),
                                    HasSubstr("core (1, 2) waits for a full element of K")));
  }
}

TEST(Gate, LetsAllThroughOnceItIsOpen) {
  const auto pass = [](Simulation& simulation, Gate& gate, int name, Log& log) -> Process {
    co_await gate.wait();
    log.emplace_back(name, simulation.now());
  };
  const auto open = [](Simulation& simulation, Gate& gate) -> Process {
    co_await simulation.delay(7);
    gate.open();
  };
  Simulation simulation;
  Gate gate(simulation, "move");
  Log log;
  simulation.start("1", pass(simulation, gate, 1, log));
  simulation.start("2", pass(simulation, gate, 2, log));
  simulation.start("opener", open(simulation, gate));
  simulation.run();
  EXPECT_THAT(log, ElementsAre(std::pair{1, 7}, std::pair{2, 7}));
}

Process move(Simulation& simulation, SharedPipe& pipe, Picoseconds wait, int64_t bytes,
             double limit, Log& log) {
  co_await simulation.delay(wait);
  co_await pipe.transfer(bytes, limit);
  log.emplace_back(static_cast<int>(bytes), simulation.now());
}

// Two of 100 and 300 bytes at 4 bytes/ps: 2 each until the small one is done at 50; then 200 are
// left at 4: 50 + 50.
TEST(SharedPipe, SharesFairlyAndGivesTheRestWhatIsFree) {
  Simulation simulation;
  SharedPipe pipe(simulation, 4, "DRAM");
  Log log;
  simulation.start("a", move(simulation, pipe, 0, 100, 100, log));
  simulation.start("b", move(simulation, pipe, 0, 300, 100, log));
  simulation.run();
  EXPECT_THAT(log, ElementsAre(std::pair{100, 50}, std::pair{300, 100}));
  EXPECT_EQ(pipe.busy(), 100);
}

// One is limited to 1 byte/ps of 4, so the other has 3: 30 bytes in 10, 100 in 100.
TEST(SharedPipe, WhatOneCannotUseTheOtherHas) {
  Simulation simulation;
  SharedPipe pipe(simulation, 4, "DRAM");
  Log log;
  simulation.start("a", move(simulation, pipe, 0, 100, 1, log));
  simulation.start("b", move(simulation, pipe, 0, 30, 100, log));
  simulation.run();
  EXPECT_THAT(log, ElementsAre(std::pair{30, 10}, std::pair{100, 100}));
}

// 400 bytes alone until 50 (200 left), then half of 4 beside 100 bytes, which end at 100 (100
// left), then alone: 125.
TEST(SharedPipe, OneThatComesLaterSlowsTheFirst) {
  Simulation simulation;
  SharedPipe pipe(simulation, 4, "DRAM");
  Log log;
  simulation.start("a", move(simulation, pipe, 0, 400, 100, log));
  simulation.start("b", move(simulation, pipe, 50, 100, 100, log));
  simulation.run();
  EXPECT_THAT(log, ElementsAre(std::pair{100, 100}, std::pair{400, 125}));
}

// Whatever the order and the sizes, nothing is faster than all bytes over the bandwidth, nor than
// its own over its limit; and with no limits the pipe is never idle.
TEST(SharedPipe, KeepsItsBandwidth) {
  Simulation simulation;
  SharedPipe pipe(simulation, 3, "DRAM");
  Log log;
  int64_t all = 0;
  for (int64_t i = 1; i <= 40; ++i) {
    const int64_t bytes = i * 37 % 101 + 1;
    all += bytes;
    simulation.start("m", move(simulation, pipe, 0, bytes, 3, log));
  }
  simulation.run();
  EXPECT_EQ(log.size(), 40);
  EXPECT_GE(simulation.now(), all / 3);
  EXPECT_LE(simulation.now(), all / 3 + 41);  // each end rounds up to a picosecond
}

}  // namespace
}  // namespace fasttps::npu::sim
