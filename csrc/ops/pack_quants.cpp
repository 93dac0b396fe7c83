#include "pack_quants.h"

#include <torch/library.h>

#include "check.h"

namespace fasttps {
namespace {

constexpr const char* kOp = "pack_quants";

at::Tensor pack_quants_meta(const at::Tensor& quants, const at::Tensor& scales,
                            const std::optional<at::Tensor>& zeros, int64_t format,
                            int64_t group_size) {
  return empty_packed(quants, check_pack_quants(quants, scales, zeros, format, group_size));
}

}  // namespace

PackedShape check_pack_quants(const at::Tensor& quants, const at::Tensor& scales,
                              const std::optional<at::Tensor>& zeros, int64_t format,
                              int64_t group_size) {
  const PackedFormat packed_format = check_format(kOp, "format", format);
  const bool row_scale = packed_format == PackedFormat::kInt8;
  const bool has_zeros = packed_format == PackedFormat::kInt4Zero;
  TORCH_CHECK_VALUE(
      row_scale || has_zeros || packed_format == PackedFormat::kInt4 ||
          packed_format == PackedFormat::kInt8Group,
      kOp, ": format must be 3 (int8), 4 (int4), 6 (int8_group) or 9 (int4_zero), got ", format);
  check_group_size(kOp, "packed", packed_format, group_size);
  const auto [rows, cols] = dims<2>(kOp, "quants", quants, "[rows, cols]");
  check_dtype(kOp, "quants", quants, {at::kByte});
  const int64_t groups = row_scale ? 1 : packed_cols(packed_format, cols, group_size) / group_size;
  check_sizes(kOp, "scales", scales, row_scale ? "[rows, 1]" : "[rows, groups]", {rows, groups});
  check_dtype(kOp, "scales", scales, {row_scale ? at::kFloat : at::kHalf});
  check_same_device(kOp, "scales", scales, "quants", quants);
  TORCH_CHECK_VALUE(zeros.has_value() == has_zeros, kOp, ": zeros must be ",
                    has_zeros ? "given" : "None", " for format ", format, ", got ",
                    has_zeros ? "None" : "some");
  if (has_zeros) {
    check_sizes(kOp, "zeros", *zeros, "[rows, groups]", {rows, groups});
    check_dtype(kOp, "zeros", *zeros, {at::kByte});
    check_same_device(kOp, "zeros", *zeros, "quants", quants);
  }
  return {packed_format, rows, cols, group_size, packed_panels(rows)};
}

TORCH_LIBRARY_IMPL(fasttps, Meta, m) { m.impl("pack_quants", pack_quants_meta); }

}  // namespace fasttps
