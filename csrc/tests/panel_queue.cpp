#include "cpu/panel_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

namespace fasttps::cpu {
namespace {

constexpr int64_t kPanelBytes = 16384;

// Runs phases[i] panels in phase i on `members` threads; takers[i][panel] is who took it, + 100 for
// each time that it was taken again. Member `late` waits until the others have nothing left.
std::vector<std::vector<int64_t>> takers(int64_t members, const std::vector<int64_t>& phases,
                                         int64_t late) {
  std::vector<std::vector<int64_t>> taken;
  for (const int64_t panels : phases) taken.emplace_back(static_cast<size_t>(panels), -100);
  PanelQueue queue(members);
  Team team(members, true);
  std::barrier barrier(members);
  std::vector<std::atomic<int64_t>> done(phases.size());
  std::vector<std::thread> threads;
  for (int64_t m = 0; m < members; ++m) {
    threads.emplace_back([&, m] {
      for (size_t phase = 0; phase < phases.size(); ++phase) {
        while (m == late && done[phase].load() < members - 1) std::this_thread::yield();
        queue.share(static_cast<int64_t>(phase), {m, members, team}, phases[phase], kPanelBytes,
                    [&](int64_t begin, int64_t end) {
                      for (int64_t panel = begin; panel < end; ++panel) {
                        int64_t& by = taken[phase][static_cast<size_t>(panel)];
                        by = by < 0 ? m : by + 100;
                      }
                    });
        ++done[phase];
        barrier.arrive_and_wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return taken;
}

TEST(PanelQueue, EachPanelOfEachPhaseOnce) {
  for (const int64_t members : {1, 2, 3, 7}) {
    const std::vector<int64_t> phases{0, 1, 2, 3, 40, 41, 1000, 1, 999, 64, 500, 500, 500};
    for (const std::vector<int64_t>& phase : takers(members, phases, -1)) {
      for (const int64_t by : phase) {
        ASSERT_GE(by, 0);
        ASSERT_LT(by, members);
      }
    }
  }
}

TEST(PanelQueue, OthersTakeWhatALateMemberLeaves) {
  const auto taken = takers(2, {400, 400}, 1);
  for (const std::vector<int64_t>& phase : taken) {
    for (const int64_t by : phase) EXPECT_EQ(by, 0);
  }
}

TEST(PanelQueue, SmallMatricesStayWithTheirThreads) {
  const auto taken = takers(2, {10}, 1);
  for (size_t panel = 0; panel < 10; ++panel) EXPECT_EQ(taken[0][panel], panel < 5 ? 0 : 1);
}

}  // namespace
}  // namespace fasttps::cpu
