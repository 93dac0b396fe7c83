#include "../../ops/packed_embedding.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <vector>

#include "../dispatch.h"
#include "../element_type.h"

namespace fasttps::cpu {
namespace {

at::Tensor packed_embedding(const at::Tensor& ids, const at::Tensor& packed, int64_t format,
                            int64_t rows, int64_t cols, at::ScalarType dtype, int64_t group_size) {
  check_packed_embedding({ids, packed, format, rows, cols, dtype, group_size});
  const at::Tensor indices = ids.to(at::kLong).contiguous();
  const int64_t* index = indices.const_data_ptr<int64_t>();
  const int64_t count = indices.numel();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(index[i] >= 0 && index[i] < rows, "packed_embedding: ids must be 0 to ",
                      rows - 1, ", got ", index[i]);
  }
  at::Tensor out = empty_packed_embedding(ids, cols, dtype);
  const ElementType type = element_type(out);
  const KernelTable& table = kernels();
  at::parallel_for(0, count, 1 + 16384 / cols, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t i = begin; i < end; ++i) {
      table.unpack_row[format](packed.const_data_ptr(), cols, group_size, index[i], row.data());
      table.store_row[type](row.data(), 1.0f, mutable_element(out, i * cols), cols);
    }
  });
  return out;
}

TORCH_LIBRARY_IMPL(fasttps, CPU, m) { m.impl("packed_embedding", packed_embedding); }

}  // namespace
}  // namespace fasttps::cpu
