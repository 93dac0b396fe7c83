#include "check.h"

#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fasttps {
namespace {

// n * stride bytes for lowest <= n <= highest.
struct ByteSteps {
  int64_t stride;
  int64_t lowest;
  int64_t highest;
};

void append_steps(std::vector<ByteSteps>& steps, const at::Tensor& t, int64_t sign) {
  const auto append = [&](int64_t stride, int64_t size) {
    for (ByteSteps& other : steps) {
      if (other.stride == stride) {
        (sign > 0 ? other.highest : other.lowest) += sign * (size - 1);
        return;
      }
    }
    steps.push_back({stride, sign > 0 ? 0 : 1 - size, sign > 0 ? size - 1 : 0});
  };
  const int64_t item_bytes = static_cast<int64_t>(t.element_size());
  append(1, item_bytes);
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) > 1 && t.stride(i) > 0) append(t.stride(i) * item_bytes, t.size(i));
  }
}

// Whether sum_i n_i stride_i = distance has a solution; strides descend. Where the strides nest, as
// those of views of one buffer do, at most a few n_i are within reach of the smaller strides.
bool reaches(const ByteSteps* step, const ByteSteps* end, int64_t distance) {
  if (step == end) return distance == 0;
  int64_t least = 0, most = 0;  // of all smaller strides together
  for (const ByteSteps* s = step + 1; s != end; ++s) {
    least += s->lowest * s->stride;
    most += s->highest * s->stride;
  }
  const auto floor_div = [](int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); };
  const int64_t from = std::max(step->lowest, -floor_div(most - distance, step->stride));
  const int64_t to = std::min(step->highest, floor_div(distance - least, step->stride));
  for (int64_t n = from; n <= to; ++n) {
    if (reaches(step + 1, end, distance - n * step->stride)) return true;
  }
  return false;
}

}  // namespace

void check_given(const char* op, const char* arg, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.defined(), op, ": ", arg, " must be a tensor, got None");
}

void check_sizes(const char* op, const char* arg, const at::Tensor& t, const char* layout,
                 at::IntArrayRef wanted) {
  check_given(op, arg, t);
  TORCH_CHECK_VALUE(t.sizes() == wanted, op, ": ", arg, " must be ", layout, " = ", wanted,
                    ", got ", t.sizes());
}

std::string dtype_name(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

void check_dtype(const char* op, const char* arg, const at::Tensor& t,
                 std::initializer_list<at::ScalarType> wanted) {
  check_given(op, arg, t);
  std::vector<std::string> names;
  for (const at::ScalarType type : wanted) {
    if (t.scalar_type() == type) return;
    names.push_back(dtype_name(type));
  }
  TORCH_CHECK_TYPE(false, op, ": ", arg, " must be ", c10::Join(" or ", names), ", got ",
                   dtype_name(t.scalar_type()));
}

void check_float_dtype(const char* op, const char* arg, const at::Tensor& t) {
  check_dtype(op, arg, t, {at::kFloat, at::kBFloat16, at::kHalf});
}

void check_same_device(const char* op, const char* arg, const at::Tensor& t, const char* other_arg,
                       const at::Tensor& other) {
  TORCH_CHECK_TYPE(t.device() == other.device(), op, ": ", arg, " must be on ", other.device(),
                   " like ", other_arg, ", got ", t.device());
}

void check_bias(const char* op, const char* arg, const std::optional<at::Tensor>& bias,
                const char* layout, int64_t size, const at::Tensor& x) {
  if (!bias) return;
  check_sizes(op, arg, *bias, layout, {size});
  check_dtype(op, arg, *bias, {x.scalar_type(), at::kFloat});
  check_same_device(op, arg, *bias, "x", x);
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

int64_t element_count(const at::Tensor& t) { return c10::multiply_integers(t.sizes()); }

void check_no_overlap(const char* op, const char* arg, const at::Tensor& t, const char* other_arg,
                      const at::Tensor& other) {
  if (t.is_meta() || element_count(t) == 0 || element_count(other) == 0 || !t.is_alias_of(other)) {
    return;
  }
  // Bytes of t and of other coincide where sum_i n_i stride_i = distance has a solution.
  std::vector<ByteSteps> steps;
  append_steps(steps, t, 1);
  append_steps(steps, other, -1);
  std::sort(steps.begin(), steps.end(),
            [](const ByteSteps& a, const ByteSteps& b) { return a.stride > b.stride; });
  const int64_t distance = static_cast<const char*>(other.const_data_ptr()) -
                           static_cast<const char*>(t.const_data_ptr());
  TORCH_CHECK_VALUE(!reaches(steps.data(), steps.data() + steps.size(), distance), op, ": ", arg,
                    " must not share memory with ", other_arg,
                    ", which is written; got overlapping views");
}

void check_count(const char* op, const char* arg, size_t got, int64_t wanted, const char* meaning) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(got) == wanted, op, ": ", arg, " must have ", wanted,
                    " elements (", meaning, "), got ", got);
}

}  // namespace fasttps
