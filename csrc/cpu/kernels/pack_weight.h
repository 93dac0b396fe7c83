// Included after kernel_table.h. Layout of a packed weight, version 1: panels of kPanelRows output
// rows walked along the columns; 4-byte elements [cols][16], 2-byte elements in pairs along the
// columns, [ceil(cols / 2)][16][2]. What lies past the last row or column is zero.
namespace fasttps::cpu {
namespace {

template <class Bits>
inline constexpr int64_t kRun = 4 / sizeof(Bits);  // columns that lie together

template <class Bits>
void pack_panel(const PackPanelTask& task) {
  constexpr int64_t run = kRun<Bits>;
  const auto* from = static_cast<const Bits*>(task.weight);
  auto* to = static_cast<Bits*>(task.packed_panel);
  for (int64_t col = 0; col < task.cols; col += run) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const int64_t row = task.panel * kPanelRows + r;
      for (int64_t c = 0; c < run; ++c) {
        const bool inside = row < task.rows && col + c < task.cols;
        to[col * kPanelRows + r * run + c] =
            inside ? from[row * task.row_stride + col + c] : Bits{0};
      }
    }
  }
}

template <class Bits>
void unpack_panel(const void* packed_panel, int64_t rows, int64_t cols, int64_t panel, void* weight,
                  int64_t row_stride) {
  constexpr int64_t run = kRun<Bits>;
  const auto* from = static_cast<const Bits*>(packed_panel);
  auto* to = static_cast<Bits*>(weight);
  for (int64_t r = 0; r < kPanelRows && panel * kPanelRows + r < rows; ++r) {
    Bits* row = to + (panel * kPanelRows + r) * row_stride;
    for (int64_t col = 0; col < cols; ++col) {
      row[col] = from[col / run * run * kPanelRows + r * run + col % run];
    }
  }
}

}  // namespace
}  // namespace fasttps::cpu
