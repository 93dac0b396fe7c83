#include "packed_format.h"

#include "check.h"

namespace fasttps {
namespace {

// Columns that share their scales or lie in one 4-byte run, and the bytes of 16 rows of them.
struct Group {
  int64_t cols, bytes;
};

Group group_of(PackedFormat format, int64_t group_size) {
  constexpr int64_t rows = kPackedPanelRows, scale = 2 * rows;
  switch (format) {
    case PackedFormat::kF32:
      return {1, 4 * rows};
    case PackedFormat::kBf16:
    case PackedFormat::kF16:
      return {2, 4 * rows};
    case PackedFormat::kInt8:
      return {32, 32 * rows};
    case PackedFormat::kInt4:
      return {group_size, group_size / 2 * rows + scale};
    case PackedFormat::kInt4Min:
      return {group_size, group_size / 2 * rows + 2 * scale};
    case PackedFormat::kInt4Zero:
      return {group_size, group_size / 2 * rows + scale + rows};
    case PackedFormat::kInt8Group:
      return {32, 32 * rows + scale};
    case PackedFormat::kQ4K:
      return {256, 128 * rows + 8 * rows + 8 * rows + 2 * scale};
    case PackedFormat::kQ6K:
      return {256, 192 * rows + 16 * rows + scale};
  }
  TORCH_INTERNAL_ASSERT(false, "format passed the check: ", static_cast<int64_t>(format));
}

}  // namespace

PackedFormat check_format(const char* op, const char* arg, int64_t format) {
  TORCH_CHECK_VALUE(format >= 0 && format <= 9, op, ": ", arg,
                    " must be 0 (f32), 1 (bf16), 2 (f16), 3 (int8), 4 (int4), 5 (int4_min), "
                    "6 (int8_group), 7 (q4_k), 8 (q6_k) or 9 (int4_zero), got ",
                    format);
  return static_cast<PackedFormat>(format);
}

void check_group_size(const char* op, const char* of, PackedFormat format, int64_t group_size) {
  switch (format) {
    case PackedFormat::kInt4:
    case PackedFormat::kInt4Min:
    case PackedFormat::kInt4Zero:
      TORCH_CHECK_VALUE(group_size == 32 || group_size == 64 || group_size == 128, op,
                        ": group size of ", of, " must be 32, 64 or 128, got ", group_size);
      return;
    case PackedFormat::kInt8Group:
      TORCH_CHECK_VALUE(group_size == 32, op, ": group size of ", of, " must be 32, got ",
                        group_size);
      return;
    default:
      TORCH_CHECK_VALUE(group_size == 0, op, ": group size of ", of,
                        " must be 0 for a format without groups of a chosen size, got ",
                        group_size);
  }
}

c10::ScalarType format_dtype(PackedFormat format) {
  switch (format) {
    case PackedFormat::kBf16:
      return at::kBFloat16;
    case PackedFormat::kF16:
      return at::kHalf;
    default:
      return at::kFloat;
  }
}

int64_t packed_cols(PackedFormat format, int64_t cols, int64_t group_size) {
  const Group group = group_of(format, group_size);
  return (cols + group.cols - 1) / group.cols * group.cols;
}

int64_t packed_panel_bytes(PackedFormat format, int64_t cols, int64_t group_size) {
  const Group group = group_of(format, group_size);
  const int64_t scales = format == PackedFormat::kInt8 && cols > 0 ? 4 * kPackedPanelRows : 0;
  return (cols + group.cols - 1) / group.cols * group.bytes + scales;
}

void check_packed(const char* op, const char* arg, const at::Tensor& packed, PackedFormat format,
                  int64_t panels, int64_t cols, int64_t group_size) {
  check_given(op, arg, packed);
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, op, ": ", arg,
                   " must be a packed weight (uint8, from pack_weight or pack_gate_up), got ",
                   dtype_name(packed.scalar_type()), " ", packed.sizes());
  check_group_size(op, arg, format, group_size);
  TORCH_CHECK_VALUE(
      (format != PackedFormat::kQ4K && format != PackedFormat::kQ6K) || cols % 256 == 0, op, ": ",
      arg, " of a format in groups of 256 must have a multiple of 256 columns, got ", cols);
  const int64_t wanted = panels * packed_panel_bytes(format, cols, group_size);
  TORCH_CHECK_VALUE(packed.dim() == 1 && element_count(packed) == wanted, op, ": ", arg,
                    " must be a packed weight of [", wanted, "] bytes (", panels,
                    " panels of 16 rows, ", cols, " columns), got ", packed.sizes());
  TORCH_CHECK_VALUE(packed.is_contiguous(), op, ": ", arg, " must be contiguous, got strides ",
                    packed.strides());
  if (packed.is_meta() || element_count(packed) == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(packed.const_data_ptr());
  TORCH_CHECK_VALUE(address % kPackedAlignmentBytes == 0, op, ": ", arg,
                    " must be 64-byte aligned, got an address ", address % kPackedAlignmentBytes,
                    " bytes past an alignment");
}

void check_dtype_of_x(const char* op, const at::Tensor& x, const char* arg, PackedFormat format) {
  TORCH_CHECK_TYPE(is_quantized(format) || x.scalar_type() == format_dtype(format), op,
                   ": x must be ", dtype_name(format_dtype(format)), " like the ", arg,
                   " weight, got ", dtype_name(x.scalar_type()));
}

}  // namespace fasttps
