#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace fasttps::cpu {

// RoPE tables in f32: row (b, token) is at cos + (b * batch_stride + token) * rotary_dim.
struct RopeTable {
  std::vector<float> cos, sin;  // empty: no rotation
  int64_t batch_rows = 0;       // 0 where all sequences share their rows, else new_tokens
  int64_t rotary_dim = 0;
  bool interleaved = false;

  const float* cos_row(int64_t b, int64_t token) const { return row(cos, b, token); }
  const float* sin_row(int64_t b, int64_t token) const { return row(sin, b, token); }

 private:
  const float* row(const std::vector<float>& table, int64_t b, int64_t token) const {
    return table.empty() ? nullptr : table.data() + (b * batch_rows + token) * rotary_dim;
  }
};

RopeTable rope_table(const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
                     bool interleaved);

// Rotates key and writes key and value [batch, new_tokens, num_kv_heads, head_dim] into the caches
// from slot seq_lens on. All arguments are checked; the first write is the first side effect.
void write_new_rows(const at::Tensor& key, const at::Tensor& value, const RopeTable& rope,
                    const at::Tensor& k_cache, const at::Tensor& v_cache,
                    const std::optional<at::Tensor>& k_scale,
                    const std::optional<at::Tensor>& v_scale, const std::vector<int64_t>& seq_lens,
                    bool ring);

}  // namespace fasttps::cpu
