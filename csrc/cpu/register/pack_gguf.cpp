#include "../../ops/pack_gguf.h"

#include <torch/library.h>

#include "packed_matmul.h"

namespace fasttps::cpu {
namespace {

// Panel p at to + p * stride.
void pack_panels(const void* blocks, int64_t format, int64_t rows, int64_t cols,
                 const PackedShape& shape, std::byte* to, int64_t stride) {
  const auto pack_panel = kernels().pack_gguf_panel[format - kFirstGgufFormat];
  for_panel_ranges(shape.panels, stride, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      pack_panel(blocks, rows, cols, panel, to + panel * stride);
    }
  });
}

at::Tensor pack_gguf(const at::Tensor& blocks, int64_t format, int64_t rows, int64_t cols) {
  const PackedShape shape = check_pack_gguf(blocks, format, rows, cols);
  at::Tensor packed = empty_packed_in_huge_pages(blocks, shape);
  if (packed.numel() == 0) return packed;
  pack_panels(blocks.const_data_ptr(), format, rows, cols, shape,
              static_cast<std::byte*>(packed.mutable_data_ptr()),
              packed_panel_bytes(shape.format, cols, shape.group_size));
  return packed;
}

void pack_gguf_out(const at::Tensor& blocks, int64_t format, int64_t rows, int64_t cols,
                   at::Tensor& out) {
  const PackedShape shape = check_pack_gguf_out(blocks, format, rows, cols, out);
  if (out.numel() == 0) return;
  pack_panels(blocks.const_data_ptr(), format, rows, cols, shape,
              static_cast<std::byte*>(out.mutable_data_ptr()), out.stride(0));
}

TORCH_LIBRARY_IMPL(fasttps, CPU, m) {
  m.impl("pack_gguf", pack_gguf);
  m.impl("pack_gguf.out", pack_gguf_out);
}

}  // namespace
}  // namespace fasttps::cpu
