#include "cpu/usable_cpus.h"

#include <gtest/gtest.h>

#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace fasttps::cpu {
namespace {

TEST(ParseCpuMax, RoundsDownToWholeCpus) {
  EXPECT_EQ(parse_cpu_max("200000 100000\n", 64), 2);
  EXPECT_EQ(parse_cpu_max("199999 100000\n", 64), 1);
  EXPECT_EQ(parse_cpu_max("350000 100000", 64), 3);
  EXPECT_EQ(parse_cpu_max("5000 100000", 64), 1);  // a twentieth of a CPU still runs a thread
}

TEST(ParseCpuMax, IsNoneWhereThereIsNoLimit) {
  for (const char* text : {"max 100000\n", "", "\n", "100000", "0 100000", "-1 100000", "1 0"}) {
    EXPECT_EQ(parse_cpu_max(text, 64), 64) << text;
  }
}

TEST(UsableCpus, IsAtMostWhatTheMachineHas) {
  EXPECT_GE(usable_cpus(), 1);
  EXPECT_LE(usable_cpus(), static_cast<int64_t>(std::thread::hardware_concurrency()));
}

#ifdef __linux__
TEST(UsableCpus, HeedsTheAffinityMask) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &before)) {
      CPU_SET(cpu, &one);
      break;
    }
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(usable_cpus(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}
#endif

}  // namespace
}  // namespace fasttps::cpu
