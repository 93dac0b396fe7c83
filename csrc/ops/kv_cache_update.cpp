#include "kv_cache_update.h"

#include <torch/library.h>

#include "check.h"

namespace fasttps {
namespace {

constexpr const char* kOp = "kv_cache_update_";
constexpr const char* kCacheLayout = "[batch, num_kv_heads, max_seq_len, head_dim]";
constexpr const char* kNewLayout = "[batch, new_tokens, num_kv_heads, head_dim]";

void check_scale(const char* op, const char* arg, const std::optional<at::Tensor>& scale,
                 const at::Tensor& k_cache, bool written) {
  if (k_cache.scalar_type() != at::kChar) {
    TORCH_CHECK_TYPE(!scale.has_value(), op, ": ", arg, " goes with int8 caches, got ",
                     dtype_name(k_cache.scalar_type()), " caches");
    return;
  }
  TORCH_CHECK_VALUE(scale.has_value(), op, ": ", arg,
                    " must be given with int8 caches, [batch, num_kv_heads, max_seq_len] float32; "
                    "got None");
  check_sizes(op, arg, *scale, "[batch, num_kv_heads, max_seq_len]", k_cache.sizes().slice(0, 3));
  check_dtype(op, arg, *scale, {at::kFloat});
  check_same_device(op, arg, *scale, "k_cache", k_cache);
  if (written) check_writable(op, arg, *scale);
}

void kv_cache_update_meta(at::Tensor& k_cache, at::Tensor& v_cache, const at::Tensor& key,
                          const at::Tensor& value, const at::Tensor& seq_lens, bool ring,
                          const std::optional<at::Tensor>& k_scale,
                          const std::optional<at::Tensor>& v_scale) {
  if (has_symbolic_sizes(k_cache) || has_symbolic_sizes(key)) return;
  check_kv_cache_update(k_cache, v_cache, key, value, seq_lens, ring, k_scale, v_scale);
}

}  // namespace

void check_caches(const char* op, const at::Tensor& k_cache, const at::Tensor& v_cache,
                  const std::optional<at::Tensor>& k_scale,
                  const std::optional<at::Tensor>& v_scale, bool written, const CacheNames& names) {
  dims<4>(op, names.k_cache, k_cache, kCacheLayout);
  check_sizes(op, names.v_cache, v_cache, kCacheLayout, k_cache.sizes());
  check_dtype(op, names.k_cache, k_cache, {at::kFloat, at::kBFloat16, at::kHalf, at::kChar});
  check_dtype(op, names.v_cache, v_cache, {k_cache.scalar_type()});
  check_same_device(op, names.v_cache, v_cache, names.k_cache, k_cache);
  check_dense_last_dim(op, names.k_cache, k_cache);
  check_dense_last_dim(op, names.v_cache, v_cache);
  check_scale(op, names.k_scale, k_scale, k_cache, written);
  check_scale(op, names.v_scale, v_scale, k_cache, written);
  if (!written) return;
  check_writable(op, names.k_cache, k_cache);
  check_writable(op, names.v_cache, v_cache);
  check_no_overlap(op, names.v_cache, v_cache, names.k_cache, k_cache);
  if (k_scale) check_no_overlap(op, names.v_scale, *v_scale, names.k_scale, *k_scale);
}

void check_new_rows(const char* op, const at::Tensor& key, const at::Tensor& value,
                    const at::Tensor& k_cache, const at::Tensor& v_cache, int64_t new_tokens) {
  const std::array<int64_t, 4> wanted{k_cache.size(0), new_tokens, k_cache.size(1),
                                      k_cache.size(3)};
  check_sizes(op, "key", key, kNewLayout, wanted);
  check_sizes(op, "value", value, kNewLayout, wanted);
  if (k_cache.scalar_type() == at::kChar) {
    check_float_dtype(op, "key", key);
  } else {
    check_dtype(op, "key", key, {k_cache.scalar_type()});
  }
  check_dtype(op, "value", value, {key.scalar_type()});
  for (const auto& [arg, t] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    check_same_device(op, arg, *t, "k_cache", k_cache);
    check_dense_last_dim(op, arg, *t);
    check_no_overlap(op, arg, *t, "k_cache", k_cache);
    check_no_overlap(op, arg, *t, "v_cache", v_cache);
  }
}

void check_per_sequence(const char* op, const char* arg, const at::Tensor& t, int64_t batch,
                        bool scalar_allowed) {
  check_given(op, arg, t);
  const bool fits = (scalar_allowed && t.dim() == 0) || (t.dim() == 1 && t.size(0) == batch);
  TORCH_CHECK_VALUE(fits, op, ": ", arg, " must be ", scalar_allowed ? "[] or " : "", "[batch] = [",
                    batch, "], got ", t.sizes());
  check_dtype(op, arg, t, {at::kLong});
}

std::vector<int64_t> per_sequence(const at::Tensor& t, int64_t batch) {
  const int64_t* values = t.const_data_ptr<int64_t>();
  std::vector<int64_t> out(static_cast<size_t>(batch));
  for (int64_t b = 0; b < batch; ++b) out[b] = values[t.dim() == 0 ? 0 : b * t.stride(0)];
  return out;
}

void check_seq_lens_values(const char* op, const std::vector<int64_t>& seq_lens, int64_t new_tokens,
                           int64_t max_seq_len, bool ring) {
  const int64_t room = ring ? kFarthestPosition : max_seq_len;
  for (size_t b = 0; b < seq_lens.size(); ++b) {
    TORCH_CHECK_VALUE(seq_lens[b] >= 0, op, ": seq_lens[", b, "] must be at least 0, got ",
                      seq_lens[b]);
    TORCH_CHECK_VALUE(seq_lens[b] <= room - new_tokens, op, ": seq_lens[", b,
                      "] + new_tokens must be at most ", ring ? "2^60 = " : "max_seq_len = ", room,
                      ", got ", seq_lens[b], " + ", new_tokens,
                      ring ? "" : "; a larger cache is needed");
  }
}

KvCacheUpdateShape check_kv_cache_update(const at::Tensor& k_cache, const at::Tensor& v_cache,
                                         const at::Tensor& key, const at::Tensor& value,
                                         const at::Tensor& seq_lens, bool ring,
                                         const std::optional<at::Tensor>& k_scale,
                                         const std::optional<at::Tensor>& v_scale) {
  check_caches(kOp, k_cache, v_cache, k_scale, v_scale, true);
  const auto [batch, new_tokens, num_kv_heads, head_dim] = dims<4>(kOp, "key", key, kNewLayout);
  check_new_rows(kOp, key, value, k_cache, v_cache, new_tokens);
  check_per_sequence(kOp, "seq_lens", seq_lens, batch, true);
  check_same_device(kOp, "seq_lens", seq_lens, "k_cache", k_cache);
  TORCH_CHECK_VALUE(!ring || new_tokens <= k_cache.size(2), kOp,
                    ": key must bring at most max_seq_len = ", k_cache.size(2),
                    " new tokens to a ring, got ", new_tokens);
  return {batch, num_kv_heads, k_cache.size(2), new_tokens, head_dim};
}

TORCH_LIBRARY_IMPL(fasttps, Meta, m) { m.impl("kv_cache_update_", kv_cache_update_meta); }

}  // namespace fasttps
