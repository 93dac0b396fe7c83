#include "../../ops/pack_quants.h"

#include <ATen/ops/max.h>
#include <torch/library.h>

#include "packed_matmul.h"

namespace fasttps::cpu {
namespace {

void check_largest(const char* arg, const at::Tensor& t, int64_t most) {
  if (t.numel() == 0) return;
  const auto largest = at::max(t).item<int64_t>();
  TORCH_CHECK_VALUE(largest <= most, "pack_quants: ", arg, " must be at most ", most, ", got ",
                    largest);
}

// The place of a format in KernelTable::pack_quants_panel.
int64_t place_of(PackedFormat format) {
  switch (format) {
    case PackedFormat::kInt8:
      return 0;
    case PackedFormat::kInt4:
      return 1;
    case PackedFormat::kInt8Group:
      return 2;
    default:
      return 3;
  }
}

at::Tensor pack_quants(const at::Tensor& quants, const at::Tensor& scales,
                       const std::optional<at::Tensor>& zeros, int64_t format, int64_t group_size) {
  const PackedShape shape = check_pack_quants(quants, scales, zeros, format, group_size);
  const bool nibbles =
      shape.format == PackedFormat::kInt4 || shape.format == PackedFormat::kInt4Zero;
  if (nibbles) check_largest("quants", quants, 15);
  if (zeros) check_largest("zeros", *zeros, 127);
  at::Tensor packed = empty_packed_in_huge_pages(quants, shape);
  const int64_t panel_bytes = packed_panel_bytes(shape.format, shape.cols, group_size);
  if (packed.numel() == 0) return packed;
  const auto pack_panel = kernels().pack_quants_panel[place_of(shape.format)];
  const at::Tensor dense_scales = scales.contiguous();
  const at::Tensor dense_zeros = zeros ? zeros->contiguous() : at::Tensor();
  const auto* const z = zeros ? dense_zeros.const_data_ptr<uint8_t>() : nullptr;
  auto* to = static_cast<std::byte*>(packed.mutable_data_ptr());
  for_panel_ranges(shape.panels, panel_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      pack_panel({quants.const_data_ptr<uint8_t>(), quants.stride(0), quants.stride(1), shape.rows,
                  shape.cols, group_size, dense_scales.const_data_ptr(), z, panel,
                  to + panel * panel_bytes});
    }
  });
  return packed;
}

TORCH_LIBRARY_IMPL(fasttps, CPU, m) { m.impl("pack_quants", pack_quants); }

}  // namespace
}  // namespace fasttps::cpu
