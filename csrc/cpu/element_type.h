#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "kernel_table.h"

namespace fasttps::cpu {

inline ElementType element_type(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return kF32;
    case at::kBFloat16:
      return kBf16;
    case at::kHalf:
      return kF16;
    case at::kChar:
      return kInt8;
    default:
      TORCH_INTERNAL_ASSERT(false, "dtype passed the check: ", t.scalar_type());
  }
}

// Element `offset` of a tensor, as the kernels want it.
inline const void* element(const at::Tensor& t, int64_t offset) {
  return static_cast<const char*>(t.const_data_ptr()) +
         offset * static_cast<int64_t>(t.element_size());
}
inline void* mutable_element(const at::Tensor& t, int64_t offset) {
  return static_cast<char*>(t.mutable_data_ptr()) + offset * static_cast<int64_t>(t.element_size());
}

}  // namespace fasttps::cpu
