#include "packed_matmul.h"

#include "../element_type.h"
#include "../huge_pages.h"

namespace fasttps::cpu {

at::Tensor empty_packed_in_huge_pages(const at::Tensor& like, const PackedShape& shape) {
  at::Tensor packed = empty_packed(like, shape);
  prefer_huge_pages(packed.mutable_data_ptr(), packed.numel());
  return packed;
}

std::vector<float> padded_bias(const std::optional<at::Tensor>& bias, int64_t size) {
  if (!bias) return {};
  std::vector<float> out(static_cast<size_t>(packed_panels(size) * kPanelRows), 0.0f);
  const at::Tensor dense = bias->contiguous();
  kernels().load_row[element_type(dense)](dense.const_data_ptr(), out.data(), size);
  return out;
}

Activations::Activations(ActivationKind kind, int64_t tokens, int64_t cols, int64_t cols_padded)
    : kind_(kind),
      cols_(cols),
      cols_padded_(cols_padded),
      row_bytes_(spread_row_bytes(activation_row_bytes(kind, cols_padded))),
      memory_(tokens * row_bytes_) {}

void Activations::prepare(const void* x, ElementType type, int64_t row_stride, int64_t tokens) {
  const int64_t stride_bytes = row_stride * (type == kF32 ? 4 : 2);
  const auto* from = static_cast<const std::byte*>(x);
  const auto prepare_row = kernels().prepare[kind_][type];
  at::parallel_for(0, tokens, 1 + 32768 / cols_padded_, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      prepare_row(from + i * stride_bytes, cols_, cols_padded_, memory_.data() + i * row_bytes_);
    }
  });
}

}  // namespace fasttps::cpu
