#pragma once
#include <cstdint>

namespace fasttps::cpu {

struct PanelRange {
  int64_t begin, end;
};

// Part `part` of `parts` contiguous ranges that together are all panels. The panels of a weight
// have the same size, so the parts read the same bytes, to within a panel.
constexpr PanelRange panel_range(int64_t panels, int64_t part, int64_t parts) {
  const int64_t each = panels / parts, more = panels % parts;
  const int64_t begin = part * each + (part < more ? part : more);
  return {begin, begin + each + (part < more ? 1 : 0)};
}

// Parts worth having for `panels` panels of panel_bytes: at most one a thread, and none so small
// that starting a thread costs more than its reading.
constexpr int64_t panel_parts(int64_t panels, int64_t panel_bytes, int64_t threads) {
  constexpr int64_t kLeastBytes = 32768;
  const int64_t worth = 1 + panels * panel_bytes / kLeastBytes;
  const int64_t most = threads < panels ? threads : panels;
  return worth < most ? worth : most;
}

}  // namespace fasttps::cpu
