#include "../../ops/pack_gguf.h"

#include <torch/library.h>

#include "packed_matmul.h"

namespace fasttps::cpu {
namespace {

at::Tensor pack_gguf(const at::Tensor& blocks, int64_t format, int64_t rows, int64_t cols) {
  const PackedShape shape = check_pack_gguf(blocks, format, rows, cols);
  at::Tensor packed = empty_packed_in_huge_pages(blocks, shape);
  const int64_t panel_bytes = packed_panel_bytes(shape.format, cols, shape.group_size);
  if (packed.numel() == 0) return packed;
  const auto pack_panel = kernels().pack_gguf_panel[format - kFirstGgufFormat];
  auto* to = static_cast<std::byte*>(packed.mutable_data_ptr());
  for_panel_ranges(shape.panels, panel_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      pack_panel(blocks.const_data_ptr(), rows, cols, panel, to + panel * panel_bytes);
    }
  });
  return packed;
}

TORCH_LIBRARY_IMPL(fasttps, CPU, m) { m.impl("pack_gguf", pack_gguf); }

}  // namespace
}  // namespace fasttps::cpu
