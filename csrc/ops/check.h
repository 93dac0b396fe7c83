#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>

// Checks that all ops share. Each names the op, the argument, what was wanted and what came.
// ValueError: shape, value, stride. TypeError: dtype, device.
namespace fasttps {

// `t` is a tensor: PyTorch takes None for one where another argument is a tensor.
void check_given(const char* op, const char* arg, const at::Tensor& t);

// Sizes of `t` as named dimensions.
//   const auto [batch, num_heads, head_dim] = dims<3>(op, "q", q, "[batch, num_heads, head_dim]");
template <size_t kRank>
std::array<int64_t, kRank> dims(const char* op, const char* arg, const at::Tensor& t,
                                const char* layout) {
  check_given(op, arg, t);
  TORCH_CHECK_VALUE(t.dim() == int64_t{kRank}, op, ": ", arg, " must be ", layout, ", got shape ",
                    t.sizes());
  std::array<int64_t, kRank> sizes;
  for (size_t i = 0; i < kRank; ++i) sizes[i] = t.size(static_cast<int64_t>(i));
  return sizes;
}

// `t` has exactly the sizes `wanted`, whose meaning is `layout`.
void check_sizes(const char* op, const char* arg, const at::Tensor& t, const char* layout,
                 at::IntArrayRef wanted);

// As Python spells it: int64, bfloat16.
std::string dtype_name(at::ScalarType type);

void check_dtype(const char* op, const char* arg, const at::Tensor& t,
                 std::initializer_list<at::ScalarType> wanted);

// float32, bfloat16 or float16.
void check_float_dtype(const char* op, const char* arg, const at::Tensor& t);

// An optional bias of `size` elements: float32 or x's dtype, on x's device.
void check_bias(const char* op, const char* arg, const std::optional<at::Tensor>& bias,
                const char* layout, int64_t size, const at::Tensor& x);

void check_same_device(const char* op, const char* arg, const at::Tensor& t, const char* other_arg,
                       const at::Tensor& other);

// Whether a size of `t` is a symbol of a graph under trace. A Meta kernel then answers in symbols
// and leaves the check to the call itself: reading a size would tie the graph to its value.
inline bool has_symbolic_sizes(const at::Tensor& t) {
  return t.defined() && t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// t.numel(), which a tensor of a graph with symbolic sizes refuses to tell.
int64_t element_count(const at::Tensor& t);

// Elements of the last dimension lie side by side; all other strides are free.
void check_dense_last_dim(const char* op, const char* arg, const at::Tensor& t);

// No two indices of `t` share an element, so it may be written.
void check_writable(const char* op, const char* arg, const at::Tensor& t);

// `x` is a normal number as float32, which kernels compute in: as finite as its reciprocal.
inline bool is_positive_float(double x) { return x > 0 && std::isnormal(static_cast<float>(x)); }

// The memory of `t` does not overlap that of `other`, which is written.
void check_no_overlap(const char* op, const char* arg, const at::Tensor& t, const char* other_arg,
                      const at::Tensor& other);

// A list of `wanted` elements, which `meaning` explains.
void check_count(const char* op, const char* arg, size_t got, int64_t wanted, const char* meaning);

// check(name), the name made only once a check has failed: a token has hundreds of elements, and
// their names would cost more than their checks.
template <class Name, class Check>
void check_named(const Name& name, const Check& check) {
  try {
    check("");
  } catch (const c10::Error&) {
    check(name().c_str());
    throw;
  }
}

}  // namespace fasttps
