#include "check.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fasttps {

void check_sizes(const char* op, const char* arg, const at::Tensor& t, const char* layout,
                 at::IntArrayRef wanted) {
  TORCH_CHECK_VALUE(t.sizes() == wanted, op, ": ", arg, " must be ", layout, " = ", wanted,
                    ", got ", t.sizes());
}

void check_dtype(const char* op, const char* arg, const at::Tensor& t,
                 std::initializer_list<at::ScalarType> wanted) {
  for (const at::ScalarType type : wanted) {
    if (t.scalar_type() == type) return;
  }
  TORCH_CHECK_TYPE(false, op, ": ", arg, " must be ", c10::Join(" or ", wanted), ", got ",
                   t.scalar_type());
}

void check_float_dtype(const char* op, const char* arg, const at::Tensor& t) {
  check_dtype(op, arg, t, {at::kFloat, at::kBFloat16, at::kHalf});
}

void check_same_device(const char* op, const char* arg, const at::Tensor& t, const char* other_arg,
                       const at::Tensor& other) {
  TORCH_CHECK_TYPE(t.device() == other.device(), op, ": ", arg, " must be on ", other.device(),
                   " like ", other_arg, ", got ", t.device());
}

void check_dense_last_dim(const char* op, const char* arg, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.size(-1) <= 1 || t.stride(-1) == 1, op, ": ", arg,
                    " must have stride 1 in its last dimension, got strides ", t.strides(),
                    " for shape ", t.sizes());
}

void check_writable(const char* op, const char* arg, const at::Tensor& t) {
  std::vector<std::pair<int64_t, int64_t>> stride_size;
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) == 0) return;
    if (t.size(i) > 1) stride_size.emplace_back(t.stride(i), t.size(i));
  }
  std::sort(stride_size.begin(), stride_size.end());
  int64_t reach = 0;  // largest offset within the dimensions of smaller stride
  for (const auto& [stride, size] : stride_size) {
    TORCH_CHECK_VALUE(stride > reach, op, ": ", arg,
                      " is written and must not overlap itself, got strides ", t.strides(),
                      " for shape ", t.sizes());
    reach += stride * (size - 1);
  }
}

void check_no_overlap(const char* op, const char* arg, const at::Tensor& t, const char* other_arg,
                      const at::Tensor& other) {
  const auto status = at::get_overlap_status(t, other);
  const bool same_first_element = t.numel() > 0 && other.numel() > 0 && t.is_alias_of(other) &&
                                  t.storage_offset() == other.storage_offset();
  TORCH_CHECK_VALUE(!same_first_element && status != at::MemOverlapStatus::Full &&
                        status != at::MemOverlapStatus::Partial,
                    op, ": ", arg, " must not share memory with ", other_arg,
                    ", which is written; got overlapping views");
}

}  // namespace fasttps
