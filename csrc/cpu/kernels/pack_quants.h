// Included after quantize_weight.h. Quants and scales that another program has rounded to, into a
// panel: a pure move.
namespace fasttps::cpu {
namespace {

// What lies past the last column or row is 0.
template <class Weight>
void pack_quants_panel(const PackQuantsTask& task) {
  const int64_t group_cols = Weight::group_cols(task.group_size);
  const int64_t group_bytes = Weight::group_bytes(group_cols);
  const int64_t run_bytes = Weight::kIsNibbles ? kNibbleRunBytes : kByteRunBytes;
  const int64_t groups = (task.cols + group_cols - 1) / group_cols;
  const int64_t first = task.panel * kPanelRows;
  const int64_t rows = task.rows - first < kPanelRows ? task.rows - first : kPanelRows;
  const uint8_t* const quants = task.quants + first * task.row_stride;
  auto* const panel = static_cast<uint8_t*>(task.packed_panel);
  __builtin_memset(
      panel, 0, static_cast<uint64_t>(quantized_panel_bytes<Weight>(task.cols, task.group_size)));
  for (int64_t col = 0; col < task.cols; col += kRunCols) {
    const int64_t cols = task.cols - col < kRunCols ? task.cols - col : kRunCols;
    uint8_t q[kPanelRows][kRunCols] = {};
    for (int64_t i = 0; i < cols; ++i) {
      const uint8_t* const column = quants + (col + i) * task.col_stride;
      for (int64_t r = 0; r < rows; ++r) q[r][i] = column[r * task.row_stride];
    }
    uint8_t* const run =
        panel + col / group_cols * group_bytes + col % group_cols / kRunCols * run_bytes;
    for (int64_t r = 0; r < rows; ++r) {
      if constexpr (Weight::kIsNibbles) {
        put_nibbles(q[r], r, run);
      } else {
        put_bytes(q[r], r, run);
      }
    }
  }
  if constexpr (Weight::kRowScale) {
    uint8_t* const to = panel + groups * group_bytes;
    __builtin_memcpy(to, static_cast<const float*>(task.scales) + first,
                     static_cast<uint64_t>(rows) * sizeof(float));
    return;
  }
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t* const to = panel + g * group_bytes + group_cols / kRunCols * run_bytes;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (first + r) * groups + g;
      __builtin_memcpy(to + 2 * r, static_cast<const uint16_t*>(task.scales) + at, 2);
      if (task.zeros != nullptr) to[kScaleBytes + r] = task.zeros[at];
    }
  }
}

}  // namespace
}  // namespace fasttps::cpu
