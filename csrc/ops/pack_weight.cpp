#include "pack_weight.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "check.h"

namespace fasttps {
namespace {

PackedShape check_pack(const char* op, const char* arg, const at::Tensor& weight, int64_t format,
                       int64_t group_size) {
  const PackedFormat packed_format = check_format(op, "format", format);
  TORCH_CHECK_VALUE(packed_format < PackedFormat::kQ4K, op,
                    ": format must be 0 to 6, since 7 (q4_k) and 8 (q6_k) come from pack_gguf "
                    "alone and 9 (int4_zero) from pack_quants, got ",
                    format);
  check_group_size(op, "packed", packed_format, group_size);
  const auto [rows, cols] = dims<2>(op, arg, weight, "[rows, cols]");
  if (is_quantized(packed_format)) {
    check_float_dtype(op, arg, weight);
  } else {
    check_dtype(op, arg, weight, {format_dtype(packed_format)});
  }
  if (element_count(weight) > 0) check_dense_last_dim(op, arg, weight);
  return {packed_format, rows, cols, group_size, packed_panels(rows)};
}

PackedShape check_unpack(const char* op, const at::Tensor& packed, int64_t format, int64_t rows,
                         int64_t cols, int64_t group_size, int64_t halves) {
  const PackedFormat packed_format = check_format(op, "format", format);
  // 2^40 keeps every product of sizes within 64 bits.
  constexpr int64_t kMost = int64_t{1} << 40;
  TORCH_CHECK_VALUE(rows >= 0 && rows <= kMost, op, ": rows must be 0 to 2^40, got ", rows);
  TORCH_CHECK_VALUE(cols >= 0 && cols <= kMost / std::max<int64_t>(rows, 1), op,
                    ": cols must be at least 0, and rows * cols at most 2^40, got ", cols);
  const PackedShape shape{packed_format, rows, cols, group_size, halves * packed_panels(rows)};
  check_packed(op, "packed", packed, packed_format, shape.panels, cols, group_size);
  return shape;
}

at::Tensor pack_weight_meta(const at::Tensor& weight, int64_t format, int64_t group_size) {
  return empty_packed(weight, check_pack_weight(weight, format, group_size));
}

at::Tensor unpack_weight_meta(const at::Tensor& packed, int64_t format, int64_t rows, int64_t cols,
                              int64_t group_size) {
  return empty_unpacked(packed, check_unpack_weight(packed, format, rows, cols, group_size));
}

at::Tensor pack_gate_up_meta(const at::Tensor& gate, const at::Tensor& up, int64_t format,
                             int64_t group_size) {
  return empty_packed(gate, check_pack_gate_up(gate, up, format, group_size));
}

std::tuple<at::Tensor, at::Tensor> unpack_gate_up_meta(const at::Tensor& packed, int64_t format,
                                                       int64_t rows, int64_t cols,
                                                       int64_t group_size) {
  const PackedShape shape = check_unpack_gate_up(packed, format, rows, cols, group_size);
  return {empty_unpacked(packed, shape), empty_unpacked(packed, shape)};
}

}  // namespace

PackedShape check_pack_weight(const at::Tensor& weight, int64_t format, int64_t group_size) {
  return check_pack("pack_weight", "weight", weight, format, group_size);
}

PackedShape check_unpack_weight(const at::Tensor& packed, int64_t format, int64_t rows,
                                int64_t cols, int64_t group_size) {
  return check_unpack("unpack_weight", packed, format, rows, cols, group_size, 1);
}

PackedShape check_pack_gate_up(const at::Tensor& gate, const at::Tensor& up, int64_t format,
                               int64_t group_size) {
  const char* op = "pack_gate_up";
  PackedShape shape = check_pack(op, "gate", gate, format, group_size);
  check_sizes(op, "up", up, "[rows, cols]", gate.sizes());
  check_pack(op, "up", up, format, group_size);
  check_same_device(op, "up", up, "gate", gate);
  shape.panels *= 2;
  return shape;
}

PackedShape check_unpack_gate_up(const at::Tensor& packed, int64_t format, int64_t rows,
                                 int64_t cols, int64_t group_size) {
  return check_unpack("unpack_gate_up", packed, format, rows, cols, group_size, 2);
}

at::Tensor empty_packed(const at::Tensor& like, const PackedShape& shape) {
  return at::empty({shape.panels * packed_panel_bytes(shape.format, shape.cols, shape.group_size)},
                   like.options().dtype(at::kByte).requires_grad(false));
}

at::Tensor empty_unpacked(const at::Tensor& like, const PackedShape& shape) {
  return at::empty({shape.rows, shape.cols}, like.options().dtype(format_dtype(shape.format)));
}

TORCH_LIBRARY_IMPL(fasttps, Meta, m) {
  m.impl("pack_weight", pack_weight_meta);
  m.impl("unpack_weight", unpack_weight_meta);
  m.impl("pack_gate_up", pack_gate_up_meta);
  m.impl("unpack_gate_up", unpack_gate_up_meta);
}

}  // namespace fasttps
