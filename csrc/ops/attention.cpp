#include "attention.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "check.h"
#include "kv_cache_update.h"

namespace fasttps {
namespace {

void check_rotation(const AttentionArgs& args, AttentionShape& shape) {
  const char* op = args.op;
  TORCH_CHECK_VALUE(args.cos.has_value() == args.sin.has_value(), op, ": ",
                    args.cos ? "sin" : "cos", " must be given with ", args.cos ? "cos" : "sin",
                    ", got None");
  if (!args.cos) return;
  const char* layout = "[1 or batch, new_tokens, rotary_dim]";
  const auto [rows, tokens, rotary_dim] = dims<3>(op, "cos", *args.cos, layout);
  TORCH_CHECK_VALUE((rows == 1 || rows == shape.batch) && tokens == shape.new_tokens, op,
                    ": cos must be ", layout, " with batch ", shape.batch, " and new_tokens ",
                    shape.new_tokens, ", got ", args.cos->sizes());
  TORCH_CHECK_VALUE(rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= shape.head_dim, op,
                    ": cos must have an even rotary_dim of 2 to head_dim = ", shape.head_dim,
                    ", got ", rotary_dim);
  check_sizes(op, "sin", *args.sin, layout, args.cos->sizes());
  for (const auto& [arg, t] : {std::pair{"cos", &*args.cos}, std::pair{"sin", &*args.sin}}) {
    check_dtype(op, arg, *t, {at::kFloat, args.query.scalar_type()});
    check_same_device(op, arg, *t, "query", args.query);
  }
  check_dtype(op, "sin", *args.sin, {args.cos->scalar_type()});
  shape.rotary_dim = rotary_dim;
}

void check_mask(const AttentionArgs& args, const AttentionShape& shape) {
  if (!args.attn_mask) return;
  const at::Tensor& mask = *args.attn_mask;
  const char* layout = "[batch or 1, num_heads or 1, new_tokens, slots]";
  const auto [batch, heads, tokens, slots] = dims<4>(args.op, "attn_mask", mask, layout);
  TORCH_CHECK_VALUE((batch == 1 || batch == shape.batch) &&
                        (heads == 1 || heads == shape.num_heads) && tokens == shape.new_tokens,
                    args.op, ": attn_mask must be ", layout, " with batch ", shape.batch,
                    ", num_heads ", shape.num_heads, " and new_tokens ", shape.new_tokens, ", got ",
                    mask.sizes());
  TORCH_CHECK_VALUE(!args.ring || slots == shape.max_seq_len, args.op,
                    ": attn_mask must cover the slots of a ring, max_seq_len = ", shape.max_seq_len,
                    ", got ", slots);
  check_dtype(args.op, "attn_mask", mask, {at::kBool});
  check_same_device(args.op, "attn_mask", mask, "query", args.query);
}

void check_options(const AttentionArgs& args, const AttentionShape& shape) {
  const char* op = args.op;
  TORCH_CHECK_VALUE(!args.scale || std::isfinite(static_cast<float>(*args.scale)), op,
                    ": scale must be finite as float32, got ", args.scale.value_or(0));
  TORCH_CHECK_VALUE(!args.softcap || is_positive_float(*args.softcap), op,
                    ": softcap must be positive and finite as float32, got ",
                    args.softcap.value_or(0));
  TORCH_CHECK_VALUE(!args.window || *args.window >= 1, op, ": window must be at least 1, got ",
                    args.window.value_or(0));
  if (args.ring) {
    TORCH_CHECK_VALUE(args.window.has_value(), op, ": window must be given with a ring, got None");
    TORCH_CHECK_VALUE(*args.window <= shape.max_seq_len - shape.new_tokens + 1, op,
                      ": window + new_tokens - 1 must be at most the slots of the ring, "
                      "max_seq_len = ",
                      shape.max_seq_len, ", got window ", *args.window, " and new_tokens ",
                      shape.new_tokens);
  }
  if (args.sinks) {
    check_sizes(op, "sinks", *args.sinks, "[num_heads]", {shape.num_heads});
    check_float_dtype(op, "sinks", *args.sinks);
    check_same_device(op, "sinks", *args.sinks, "query", args.query);
  }
  if (args.kv_start) {
    check_per_sequence(op, "kv_start", *args.kv_start, shape.batch, false);
    check_same_device(op, "kv_start", *args.kv_start, "query", args.query);
  }
  if (args.query_start) {
    check_per_sequence(op, "query_start", *args.query_start, shape.batch, true);
    check_same_device(op, "query_start", *args.query_start, "query", args.query);
  }
}

}  // namespace

AttentionShape check_attention(const AttentionArgs& args) {
  const char* op = args.op;
  const auto [batch, new_tokens, num_heads, head_dim] =
      dims<4>(op, "query", args.query, "[batch, new_tokens, num_heads, head_dim]");
  check_float_dtype(op, "query", args.query);
  check_dense_last_dim(op, "query", args.query);
  TORCH_CHECK_VALUE(args.key.has_value() == args.value.has_value(), op, ": ",
                    args.key ? "value" : "key", " must be given with ", args.key ? "key" : "value",
                    ", got None");
  const bool appends = args.key.has_value();
  check_caches(op, args.k_cache, args.v_cache, args.k_scale, args.v_scale, appends);
  const int64_t num_kv_heads = args.k_cache.size(1);
  const int64_t max_seq_len = args.k_cache.size(2);
  TORCH_CHECK_VALUE(args.k_cache.size(0) == batch && args.k_cache.size(3) == head_dim, op,
                    ": k_cache must have batch ", batch, " and head_dim ", head_dim,
                    " like query, got ", args.k_cache.sizes());
  TORCH_CHECK_VALUE(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0, op,
                    ": query must have a multiple of num_kv_heads = ", num_kv_heads, " heads, got ",
                    num_heads);
  TORCH_CHECK_VALUE(head_dim > 0, op, ": query must have a head_dim of at least 1, got ", head_dim);
  if (args.k_cache.scalar_type() != at::kChar) {
    check_dtype(op, "k_cache", args.k_cache, {args.query.scalar_type(), at::kChar});
  }
  check_same_device(op, "k_cache", args.k_cache, "query", args.query);
  if (appends) {
    check_new_rows(op, *args.key, *args.value, args.k_cache, args.v_cache, new_tokens);
    check_dtype(op, "key", *args.key, {args.query.scalar_type()});
    check_no_overlap(op, "query", args.query, "k_cache", args.k_cache);
    check_no_overlap(op, "query", args.query, "v_cache", args.v_cache);
  }
  check_per_sequence(op, "seq_lens", args.seq_lens, batch, true);
  check_same_device(op, "seq_lens", args.seq_lens, "query", args.query);

  AttentionShape shape{batch,    new_tokens,  num_heads, num_kv_heads,
                       head_dim, max_seq_len, 0,         appends};
  check_rotation(args, shape);
  check_mask(args, shape);
  check_options(args, shape);
  return shape;
}

AttentionPositions check_attention_positions(const AttentionArgs& args,
                                             const AttentionShape& shape) {
  AttentionPositions at;
  at.seq_lens = per_sequence(args.seq_lens, shape.batch);
  const int64_t appended = shape.appends ? shape.new_tokens : 0;
  check_seq_lens_values(args.op, at.seq_lens, appended, shape.max_seq_len, args.ring);
  at.query_start = args.query_start ? per_sequence(*args.query_start, shape.batch) : at.seq_lens;
  at.kv_start = args.kv_start ? per_sequence(*args.kv_start, shape.batch)
                              : std::vector<int64_t>(static_cast<size_t>(shape.batch), 0);
  at.kv_len = at.seq_lens;
  for (int64_t b = 0; b < shape.batch; ++b) {
    at.kv_len[b] += appended;
    at.query_start[b] = std::clamp(at.query_start[b], -kFarthestPosition, kFarthestPosition);
    at.kv_start[b] = std::clamp<int64_t>(at.kv_start[b], 0, at.kv_len[b]);
    TORCH_CHECK_VALUE(!args.attn_mask || args.ring || args.attn_mask->size(3) >= at.kv_len[b],
                      args.op, ": attn_mask must cover the ", at.kv_len[b],
                      " positions of the cache, got ", args.attn_mask->size(3));
    if (args.ring && at.kv_len[b] > shape.max_seq_len) {
      const int64_t oldest_wanted = at.query_start[b] - *args.window + 1;
      TORCH_CHECK_VALUE(oldest_wanted >= at.kv_len[b] - shape.max_seq_len, args.op,
                        ": query_start[", b, "] - window + 1 must not lie before position ",
                        at.kv_len[b] - shape.max_seq_len, ", the oldest in the ring; got ",
                        oldest_wanted);
    }
  }
  return at;
}

AttentionResult empty_attention_result(const AttentionArgs& args, bool with_lse) {
  const at::Tensor& query = args.query;
  auto options = query.options().requires_grad(false);
  if (with_lse) options = options.dtype(at::kFloat);
  at::Tensor out = at::empty_symint(query.sym_sizes(), options), lse;
  if (with_lse) {
    lse = at::empty_symint({query.sym_size(0), query.sym_size(2), query.sym_size(1)}, options);
  }
  return {out, lse};
}

AttentionResult attention_meta(const AttentionArgs& args, bool with_lse) {
  bool symbolic = has_symbolic_sizes(args.query) || has_symbolic_sizes(args.k_cache);
  for (const auto* t : {&args.key, &args.cos, &args.attn_mask}) {
    symbolic |= t->has_value() && has_symbolic_sizes(**t);
  }
  if (!symbolic) check_attention(args);
  return empty_attention_result(args, with_lse);
}

}  // namespace fasttps
