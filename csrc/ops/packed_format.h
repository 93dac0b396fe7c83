#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace fasttps {

// How a packed weight lies in memory; the numbers are part of the interface. Layout version 1:
// panels of 16 output rows walked along the columns; what lies past the last row or column adds
// nothing. In a gate_up weight the panels alternate: 2p holds rows 16 p... of gate, 2p + 1 those of
// up (FastTPS, paper 000, Fusion MLP: one matmul whose halves meet in the registers).
//
//   kF32        [cols][16]
//   kBf16 kF16  [cols / 2][16][2]
// Quantised: w from an unsigned q and f16 scales of each row and group of columns, but for kInt8,
// whose scale is f32 and of the whole row. csrc/cpu/kernels/quantized_format.h draws the bytes.
//   kInt8       d (q - 128)                                   8 bits a weight, and the scale
//   kInt4       d (q - 8)         groups of 32, 64, 128       4.5 bits in groups of 32; Q4_0
//   kInt4Min    d q + m           groups of 32, 64, 128       5; Q4_1
//   kInt8Group  d (q - 128)       groups of 32                8.5; Q8_0
//   kQ4K        d sc q - dmin mn  groups of 256, 8 sc and mn  4.625; Q4_K
//   kQ6K        d sc (q - 32)     groups of 256, 16 sc        6.5625; Q6_K
//   kInt4Zero   d (q - z)         groups of 32, 64, 128       4.75; AWQ, GPTQ; z is a byte
enum class PackedFormat : int64_t {
  kF32 = 0,
  kBf16 = 1,
  kF16 = 2,
  kInt8 = 3,
  kInt4 = 4,
  kInt4Min = 5,
  kInt8Group = 6,
  kQ4K = 7,
  kQ6K = 8,
  kInt4Zero = 9,
};
inline constexpr int64_t kPackedLayoutVersion = 1;
inline constexpr int64_t kPackedPanelRows = 16;
inline constexpr int64_t kPackedAlignmentBytes = 64;

// Throws ValueError for a number that is no format.
PackedFormat check_format(const char* op, const char* arg, int64_t format);

// Throws ValueError for a group size that the format does not have; `of` names the packed weight.
void check_group_size(const char* op, const char* of, PackedFormat format, int64_t group_size);

constexpr bool is_quantized(PackedFormat format) { return format >= PackedFormat::kInt8; }

// What is packed and unpacked: float32 for the quantised formats.
c10::ScalarType format_dtype(PackedFormat format);

inline int64_t packed_panels(int64_t rows) {
  return (rows + kPackedPanelRows - 1) / kPackedPanelRows;
}
// Columns rounded up to whole groups, or to whole 4-byte runs.
int64_t packed_cols(PackedFormat format, int64_t cols, int64_t group_size);
int64_t packed_panel_bytes(PackedFormat format, int64_t cols, int64_t group_size);

// `packed` is uint8, 1-D, contiguous, 64-byte aligned, of exactly `panels` panels of `cols`
// columns.
void check_packed(const char* op, const char* arg, const at::Tensor& packed, PackedFormat format,
                  int64_t panels, int64_t cols, int64_t group_size);

// x may meet weights of `format`: it has the format's dtype, or any float dtype if it is quantised.
void check_dtype_of_x(const char* op, const at::Tensor& x, const char* arg, PackedFormat format);

}  // namespace fasttps
