#include "../../ops/kv_cache_update.h"

#include <torch/library.h>

#include "cache_writer.h"

namespace fasttps::cpu {
namespace {

void kv_cache_update(at::Tensor& k_cache, at::Tensor& v_cache, const at::Tensor& key,
                     const at::Tensor& value, const at::Tensor& seq_lens, bool ring,
                     const std::optional<at::Tensor>& k_scale,
                     const std::optional<at::Tensor>& v_scale) {
  const KvCacheUpdateShape shape =
      check_kv_cache_update(k_cache, v_cache, key, value, seq_lens, ring, k_scale, v_scale);
  const std::vector<int64_t> lengths = per_sequence(seq_lens, shape.batch);
  check_seq_lens_values("kv_cache_update_", lengths, shape.new_tokens, shape.max_seq_len, ring);
  if (key.numel() == 0) return;
  write_new_rows(key, value, {}, k_cache, v_cache, k_scale, v_scale, lengths, ring);
}

TORCH_LIBRARY_IMPL(fasttps, CPU, m) { m.impl("kv_cache_update_", kv_cache_update); }

}  // namespace
}  // namespace fasttps::cpu
