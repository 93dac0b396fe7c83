#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "panel_split.h"
#include "team.h"

// Work that a team shares panel by panel: a member takes its own contiguous range first, and then
// what those that are behind have left, so that a thread that was held up holds up no one.
namespace fasttps::cpu {

class PanelQueue {
 public:
  explicit PanelQueue(int64_t members)
      : taken_(std::make_unique<Taken[]>(static_cast<size_t>(kPhases * members))) {}

  // Calls run(begin, end) for the panels of the team's phase number `phase`, each panel once among
  // all members. Every member calls it for the phases 0, 1, ... with a barrier between two of them.
  template <class Run>
  void share(int64_t phase, const TeamMember& member, int64_t panels, int64_t panel_bytes,
             const Run& run) {
    // The barrier before this phase has ended phase - 1, so none reads the counts of phase - 2, and
    // the one after it shows this 0 to all.
    taken(phase + 1, member.index, member.size).store(0, std::memory_order_relaxed);
    const int64_t least = std::max<int64_t>(1, kLeastBytes / panel_bytes);
    if (panels < 4 * least * member.size) {
      const PanelRange range = panel_range(panels, member.index, member.size);
      if (range.begin < range.end) run(range.begin, range.end);
      return;
    }
    for (int64_t i = 0; i < member.size; ++i) {
      const int64_t owner = (member.index + i) % member.size;
      const PanelRange range = panel_range(panels, owner, member.size);
      const int64_t count = range.end - range.begin;
      std::atomic<int64_t>& next = taken(phase, owner, member.size);
      int64_t at = next.load(std::memory_order_relaxed);
      while (at < count) {
        // An owner takes most of what is left, others the least.
        const int64_t size = i == 0 ? std::max(least, (count - at) * 3 / 4) : least;
        const int64_t end = std::min(count, at + size);
        if (!next.compare_exchange_weak(at, end, std::memory_order_relaxed)) continue;
        run(range.begin + at, range.begin + end);
        at = next.load(std::memory_order_relaxed);
      }
    }
  }

 private:
  static constexpr int64_t kPhases = 3;
  // Enough for a call of a kernel not to show.
  static constexpr int64_t kLeastBytes = 65536;

  struct alignas(64) Taken {
    std::atomic<int64_t> panels{0};
  };
  std::atomic<int64_t>& taken(int64_t phase, int64_t index, int64_t members) {
    return taken_[static_cast<size_t>(phase % kPhases * members + index)].panels;
  }

  std::unique_ptr<Taken[]> taken_;
};

}  // namespace fasttps::cpu
