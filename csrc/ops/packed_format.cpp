#include "packed_format.h"

#include "check.h"

namespace fasttps {

PackedFormat check_format(const char* op, const char* arg, int64_t format) {
  TORCH_CHECK_VALUE(format >= 0 && format <= 2, op, ": ", arg,
                    " must be 0 (f32), 1 (bf16) or 2 (f16), got ", format);
  return static_cast<PackedFormat>(format);
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

int64_t format_element_bytes(PackedFormat format) {
  return static_cast<int64_t>(c10::elementSize(format_dtype(format)));
}

int64_t packed_cols(PackedFormat format, int64_t cols) {
  const int64_t run = 4 / format_element_bytes(format);
  return (cols + run - 1) / run * run;
}

int64_t packed_panel_bytes(PackedFormat format, int64_t cols) {
  return kPackedPanelRows * packed_cols(format, cols) * format_element_bytes(format);
}

void check_packed(const char* op, const char* arg, const at::Tensor& packed, PackedFormat format,
                  int64_t panels, int64_t cols, int64_t group_size) {
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, op, ": ", arg,
                   " must be a packed weight (uint8, from pack_weight or pack_gate_up), got ",
                   dtype_name(packed.scalar_type()), " ", packed.sizes());
  const int64_t wanted = panels * packed_panel_bytes(format, cols);
  TORCH_CHECK_VALUE(packed.dim() == 1 && element_count(packed) == wanted, op, ": ", arg,
                    " must be a packed weight of [", wanted, "] bytes (", panels,
                    " panels of 16 rows, ", cols, " columns), got ", packed.sizes());
  TORCH_CHECK_VALUE(packed.is_contiguous(), op, ": ", arg, " must be contiguous, got strides ",
                    packed.strides());
  TORCH_CHECK_VALUE(group_size == 0, op, ": group size of ", arg,
                    " must be 0 for a format without groups, got ", group_size);
  if (packed.is_meta() || element_count(packed) == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(packed.const_data_ptr());
  TORCH_CHECK_VALUE(address % kPackedAlignmentBytes == 0, op, ": ", arg,
                    " must be 64-byte aligned, got an address ", address % kPackedAlignmentBytes,
                    " bytes past an alignment");
}

}  // namespace fasttps
