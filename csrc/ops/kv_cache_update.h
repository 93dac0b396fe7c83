#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace fasttps {

// kv_cache_update_: writes new keys and values into the static cache at slot seq_lens (FastTPS,
// paper 000, GKVC: the address jump that replaces the concatenation).
//   k_cache, v_cache [batch, num_kv_heads, max_seq_len, head_dim], dense last dimension
//   key, value       [batch, new_tokens, num_kv_heads, head_dim], dense last dimension
//   seq_lens         int64 [] or [batch]: tokens already in the cache
//   ring             slot = position mod max_seq_len
//   k_scale, v_scale f32 [batch, num_kv_heads, max_seq_len], for int8 caches only
struct KvCacheUpdateShape {
  int64_t batch, num_kv_heads, max_seq_len, new_tokens, head_dim;
};

// What the caches are called in errors.
struct CacheNames {
  const char* k_cache = "k_cache";
  const char* v_cache = "v_cache";
  const char* k_scale = "k_scale";
  const char* v_scale = "v_scale";
};

// What the caches of every op must satisfy together; `written` adds that no element is shared.
void check_caches(const char* op, const at::Tensor& k_cache, const at::Tensor& v_cache,
                  const std::optional<at::Tensor>& k_scale,
                  const std::optional<at::Tensor>& v_scale, bool written,
                  const CacheNames& names = {});

// The one check of kv_cache_update_ for all devices; values of seq_lens are not read.
KvCacheUpdateShape check_kv_cache_update(const at::Tensor& k_cache, const at::Tensor& v_cache,
                                         const at::Tensor& key, const at::Tensor& value,
                                         const at::Tensor& seq_lens, bool ring,
                                         const std::optional<at::Tensor>& k_scale,
                                         const std::optional<at::Tensor>& v_scale);

// key and value against the cache's sizes and each other.
void check_new_rows(const char* op, const at::Tensor& key, const at::Tensor& value,
                    const at::Tensor& k_cache, const at::Tensor& v_cache, int64_t new_tokens);

// int64 [] or [batch] in host memory, as one value a sequence.
std::vector<int64_t> per_sequence(const at::Tensor& t, int64_t batch);

// Positions are below this, so that sums and differences of a few of them fit 64 bits.
inline constexpr int64_t kFarthestPosition = int64_t{1} << 60;

// Throws ValueError unless every sequence has room: 0 <= length, and length + new_tokens <=
// max_seq_len, or kFarthestPosition where the cache is a ring.
void check_seq_lens_values(const char* op, const std::vector<int64_t>& seq_lens, int64_t new_tokens,
                           int64_t max_seq_len, bool ring);

// Shape and type of an int64 [] or [batch] argument.
void check_per_sequence(const char* op, const char* arg, const at::Tensor& t, int64_t batch,
                        bool scalar_allowed);

}  // namespace fasttps
