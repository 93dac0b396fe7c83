#include "../../ops/pack_weight.h"

#include <torch/library.h>

#include <algorithm>

#include "../element_type.h"
#include "packed_matmul.h"

namespace fasttps::cpu {
namespace {

// One [rows, cols] matrix whose panel p lies at panel first + p * step of `packed`.
struct Half {
  const at::Tensor& weight;
  int64_t first, step;
};

int64_t panel_bytes_of(const PackedShape& shape) {
  return packed_panel_bytes(shape.format, shape.cols, shape.group_size);
}

template <class Work>
void for_each_panel(const PackedShape& shape, const Work& work) {
  const int64_t panel_bytes = panel_bytes_of(shape);
  if (panel_bytes == 0) return;
  for_panel_ranges(packed_panels(shape.rows), panel_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) work(panel);
  });
}

void pack(const PackedShape& shape, const Half& half, const at::Tensor& packed) {
  const auto pack_panel = kernels().pack_panel[static_cast<int64_t>(shape.format)];
  const int64_t panel_bytes = panel_bytes_of(shape);
  auto* to = static_cast<char*>(packed.mutable_data_ptr());
  for_each_panel(shape, [&](int64_t panel) {
    pack_panel({half.weight.const_data_ptr(), element_type(half.weight), half.weight.stride(0),
                shape.rows, shape.cols, shape.group_size, panel,
                to + (half.first + panel * half.step) * panel_bytes});
  });
}

// The panels of `half` among those of a gate_up as a weight of their own would need its panels to
// follow each other, so a quantised row is unpacked from its panel alone.
void unpack(const PackedShape& shape, const at::Tensor& packed, const Half& half) {
  const int64_t panel_bytes = panel_bytes_of(shape);
  const auto* from = static_cast<const char*>(packed.const_data_ptr());
  const at::Tensor& weight = half.weight;
  for_each_panel(shape, [&](int64_t panel) {
    const char* packed_panel = from + (half.first + panel * half.step) * panel_bytes;
    if (!is_quantized(shape.format)) {
      kernels().unpack_panel[weight.element_size() == 4 ? 0 : 1](
          packed_panel, shape.rows, shape.cols, panel, weight.mutable_data_ptr(), weight.stride(0));
      return;
    }
    const auto unpack_row = kernels().unpack_row[static_cast<int64_t>(shape.format)];
    const int64_t first = panel * kPanelRows;
    for (int64_t row = first; row < std::min(first + kPanelRows, shape.rows); ++row) {
      unpack_row(packed_panel, shape.cols, shape.group_size, row - first,
                 static_cast<float*>(mutable_element(weight, row * weight.stride(0))));
    }
  });
}

at::Tensor pack_weight(const at::Tensor& weight, int64_t format, int64_t group_size) {
  const PackedShape shape = check_pack_weight(weight, format, group_size);
  at::Tensor packed = empty_packed_in_huge_pages(weight, shape);
  pack(shape, {weight, 0, 1}, packed);
  return packed;
}

at::Tensor pack_gate_up(const at::Tensor& gate, const at::Tensor& up, int64_t format,
                        int64_t group_size) {
  const PackedShape shape = check_pack_gate_up(gate, up, format, group_size);
  at::Tensor packed = empty_packed_in_huge_pages(gate, shape);
  pack(shape, {gate, 0, 2}, packed);
  pack(shape, {up, 1, 2}, packed);
  return packed;
}

at::Tensor unpack_weight(const at::Tensor& packed, int64_t format, int64_t rows, int64_t cols,
                         int64_t group_size) {
  const PackedShape shape = check_unpack_weight(packed, format, rows, cols, group_size);
  at::Tensor weight = empty_unpacked(packed, shape);
  unpack(shape, packed, {weight, 0, 1});
  return weight;
}

std::tuple<at::Tensor, at::Tensor> unpack_gate_up(const at::Tensor& packed, int64_t format,
                                                  int64_t rows, int64_t cols, int64_t group_size) {
  const PackedShape shape = check_unpack_gate_up(packed, format, rows, cols, group_size);
  at::Tensor gate = empty_unpacked(packed, shape), up = empty_unpacked(packed, shape);
  unpack(shape, packed, {gate, 0, 2});
  unpack(shape, packed, {up, 1, 2});
  return {gate, up};
}

TORCH_LIBRARY_IMPL(fasttps, CPU, m) {
  m.impl("pack_weight", pack_weight);
  m.impl("unpack_weight", unpack_weight);
  m.impl("pack_gate_up", pack_gate_up);
  m.impl("unpack_gate_up", unpack_gate_up);
}

}  // namespace
}  // namespace fasttps::cpu
