#include "../../ops/merge_attention.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../dispatch.h"

namespace fasttps::cpu {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

std::tuple<at::Tensor, at::Tensor> merge_attention(at::TensorList outs, at::TensorList lses) {
  const MergeAttentionShape shape = check_merge_attention(outs, lses);
  auto result = empty_merge_attention_result(outs);
  float* out = std::get<0>(result).mutable_data_ptr<float>();
  float* lse = std::get<1>(result).mutable_data_ptr<float>();
  const int64_t rows = shape.batch * shape.new_tokens * shape.num_heads;
  const int64_t rows_per_thread = 1 + 32768 / (shape.parts * (shape.head_dim + 1));
  at::parallel_for(0, rows, rows_per_thread, [&](int64_t begin, int64_t end) {
    std::vector<const float*> parts;
    std::vector<double> part_lse;
    std::vector<float> weights;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t h = row % shape.num_heads;
      const int64_t t = row / shape.num_heads % shape.new_tokens;
      const int64_t b = row / shape.num_heads / shape.new_tokens;
      parts.clear();
      part_lse.clear();
      float max = kMinusInf;
      for (int64_t p = 0; p < shape.parts; ++p) {
        const float x =
            lses[p].const_data_ptr<float>()[b * lses[p].stride(0) + h * lses[p].stride(1) +
                                            t * lses[p].stride(2)];
        if (x == kMinusInf) continue;  // saw nothing
        max = std::max(max, x);
        part_lse.push_back(x);
        parts.push_back(outs[p].const_data_ptr<float>() + b * outs[p].stride(0) +
                        t * outs[p].stride(1) + h * outs[p].stride(2));
      }
      double sum = 0.0;
      for (const double x : part_lse) sum += std::exp(x - max);
      weights.clear();
      for (const double x : part_lse)
        weights.push_back(static_cast<float>(std::exp(x - max) / sum));
      kernels().merge_attention(parts.data(), weights.data(), static_cast<int64_t>(parts.size()),
                                out + row * shape.head_dim, shape.head_dim);
      lse[(b * shape.num_heads + h) * shape.new_tokens + t] =
          parts.empty() ? kMinusInf : static_cast<float>(max + std::log(sum));
    }
  });
  return result;
}

TORCH_LIBRARY_IMPL(fasttps, CPU, m) { m.impl("merge_attention", merge_attention); }

}  // namespace
}  // namespace fasttps::cpu
