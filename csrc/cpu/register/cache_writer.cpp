#include "cache_writer.h"

#include <ATen/Parallel.h>

#include <cstring>

#include "../dispatch.h"
#include "../element_type.h"

namespace fasttps::cpu {
namespace {

std::vector<float> to_f32(const at::Tensor& t) {
  const int64_t rows = t.size(0), tokens = t.size(1), dim = t.size(2);
  std::vector<float> out(static_cast<size_t>(t.numel()));
  const at::Tensor dense = t.stride(2) == 1 || dim <= 1 ? t : t.contiguous();
  for (int64_t b = 0; b < rows; ++b) {
    for (int64_t i = 0; i < tokens; ++i) {
      kernels().load_row[element_type(t)](element(dense, b * dense.stride(0) + i * dense.stride(1)),
                                          out.data() + (b * tokens + i) * dim, dim);
    }
  }
  return out;
}

// One row of key or value into its slot.
struct RowWriter {
  const at::Tensor& rows;
  const at::Tensor& cache;
  const std::optional<at::Tensor>& scale;
  const RopeTable* rope;  // null: no rotation
  const KernelTable& table = kernels();
  int64_t head_dim = rows.size(3);

  void write(int64_t b, int64_t token, int64_t head, int64_t slot, float* row_f32) const {
    const void* from =
        element(rows, b * rows.stride(0) + token * rows.stride(1) + head * rows.stride(2));
    void* to = mutable_element(
        cache, b * cache.stride(0) + head * cache.stride(1) + slot * cache.stride(2));
    const float* cos = rope != nullptr ? rope->cos_row(b, token) : nullptr;
    const ElementType row_type = element_type(rows), cache_type = element_type(cache);
    if (cos == nullptr && row_type == cache_type) {
      std::memcpy(to, from, static_cast<size_t>(head_dim) * rows.element_size());
      return;
    }
    if (cos != nullptr) {
      table.rope_row[row_type]({from, cos, rope->sin_row(b, token), rope->rotary_dim, head_dim,
                                rope->interleaved, 1.0f, row_f32});
    } else {
      table.load_row[row_type](from, row_f32, head_dim);
    }
    if (cache_type == kInt8) {
      float* factor = scale->mutable_data_ptr<float>() + b * scale->stride(0) +
                      head * scale->stride(1) + slot * scale->stride(2);
      table.quantize_row(row_f32, static_cast<int8_t*>(to), factor, head_dim);
    } else {
      table.store_row[cache_type](row_f32, 1.0f, to, head_dim);
    }
  }
};

}  // namespace

RopeTable rope_table(const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
                     bool interleaved) {
  if (!cos) return {};
  return {to_f32(*cos), to_f32(*sin), cos->size(0) > 1 ? cos->size(1) : 0, cos->size(2),
          interleaved};
}

void write_new_rows(const at::Tensor& key, const at::Tensor& value, const RopeTable& rope,
                    const at::Tensor& k_cache, const at::Tensor& v_cache,
                    const std::optional<at::Tensor>& k_scale,
                    const std::optional<at::Tensor>& v_scale, const std::vector<int64_t>& seq_lens,
                    bool ring) {
  const int64_t new_tokens = key.size(1), num_kv_heads = key.size(2), head_dim = key.size(3);
  const int64_t slots = k_cache.size(2);
  const RowWriter keys{key, k_cache, k_scale, &rope};
  const RowWriter values{value, v_cache, v_scale, nullptr};
  const int64_t rows = key.size(0) * new_tokens * num_kv_heads;
  const int64_t rows_per_thread = 1 + 32768 / head_dim;  // enough to pay for waking a thread
  at::parallel_for(0, rows, rows_per_thread, [&](int64_t begin, int64_t end) {
    std::vector<float> row_f32(static_cast<size_t>(head_dim));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i % num_kv_heads;
      const int64_t token = i / num_kv_heads % new_tokens;
      const int64_t b = i / num_kv_heads / new_tokens;
      const int64_t position = seq_lens[b] + token;
      const int64_t slot = ring ? position % slots : position;
      keys.write(b, token, head, slot, row_f32.data());
      values.write(b, token, head, slot, row_f32.data());
    }
  });
}

}  // namespace fasttps::cpu
