#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace fasttps {

// How a packed weight lies in memory; the numbers are part of the interface. Layout version 1:
// panels of 16 output rows walked along the columns, 4-byte elements [cols][16], 2-byte elements
// [ceil(cols / 2)][16][2]; what lies past the last row or column is zero. In a gate_up weight the
// panels alternate: 2p holds rows 16 p... of gate, 2p + 1 those of up (FastTPS, paper 000, Fusion
// MLP: one matmul whose halves meet in the registers).
enum class PackedFormat : int64_t { kF32 = 0, kBf16 = 1, kF16 = 2 };
inline constexpr int64_t kPackedLayoutVersion = 1;
inline constexpr int64_t kPackedPanelRows = 16;
inline constexpr int64_t kPackedAlignmentBytes = 64;

// Throws ValueError for a number that is no format.
PackedFormat check_format(const char* op, const char* arg, int64_t format);

c10::ScalarType format_dtype(PackedFormat format);
int64_t format_element_bytes(PackedFormat format);

inline int64_t packed_panels(int64_t rows) {
  return (rows + kPackedPanelRows - 1) / kPackedPanelRows;
}
// Columns rounded up to whole 4-byte runs.
int64_t packed_cols(PackedFormat format, int64_t cols);
int64_t packed_panel_bytes(PackedFormat format, int64_t cols);

// `packed` is uint8, 1-D, contiguous, 64-byte aligned, of exactly `panels` panels of `cols`
// columns.
void check_packed(const char* op, const char* arg, const at::Tensor& packed, PackedFormat format,
                  int64_t panels, int64_t cols, int64_t group_size);

}  // namespace fasttps
