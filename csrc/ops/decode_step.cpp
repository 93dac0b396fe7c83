#include "decode_step.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "check.h"
#include "decode_step_entry.h"
#include "gate_up_silu_mlp.h"
#include "kv_cache_update.h"

namespace fasttps {
namespace {

constexpr const char* kOp = "decode_step";

// Layers write side by side: no cache or scale may overlap another. Those whose extents meet are
// looked at element by element.
void check_caches_apart(const DecodeStepArgs& args) {
  struct Extent {
    const char* begin;
    const char* end;
    const at::Tensor* t;
    const char* list;
    size_t layer;
  };
  std::vector<Extent> extents;
  const auto append = [&](const char* list, at::TensorList tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& t = tensors[i];
      if (element_count(t) == 0) continue;
      int64_t last = 0;
      for (int64_t d = 0; d < t.dim(); ++d) last += t.stride(d) * (t.size(d) - 1);
      const auto* begin = static_cast<const char*>(t.const_data_ptr());
      const auto item_bytes = static_cast<int64_t>(t.element_size());
      extents.push_back({begin, begin + (last + 1) * item_bytes, &t, list, i});
    }
  };
  append("k_caches", args.k_caches);
  append("v_caches", args.v_caches);
  if (args.k_scales) append("k_scales", *args.k_scales);
  if (args.v_scales) append("v_scales", *args.v_scales);
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < extents.size(); ++i) {
    for (size_t j = i + 1; j < extents.size() && extents[j].begin < extents[i].end; ++j) {
      check_named([&] { return c10::str(extents[j].list, "[", extents[j].layer, "]"); },
                  [&](const char* name) {
                    check_no_overlap(kOp, name, *extents[j].t, "another cache", *extents[i].t);
                  });
    }
  }
}

void check_all_caches(const DecodeStepArgs& args, const DecodeStepShape& shape) {
  const auto scale = [](const std::optional<at::TensorList>& scales, size_t i) {
    return scales ? std::optional<at::Tensor>((*scales)[i]) : std::nullopt;
  };
  for (size_t i = 0; i < args.k_caches.size(); ++i) {
    const at::Tensor &k = args.k_caches[i], &v = args.v_caches[i];
    const auto of_layer = [&](const char* list) { return c10::str(list, "[", i, "]"); };
    try {
      check_caches(kOp, k, v, scale(args.k_scales, i), scale(args.v_scales, i), true);
    } catch (const c10::Error&) {
      const std::string names[] = {of_layer("k_caches"), of_layer("v_caches"), of_layer("k_scales"),
                                   of_layer("v_scales")};
      check_caches(kOp, k, v, scale(args.k_scales, i), scale(args.v_scales, i), true,
                   {names[0].c_str(), names[1].c_str(), names[2].c_str(), names[3].c_str()});
      throw;
    }
    check_named([&] { return of_layer("k_caches"); },
                [&](const char* name) {
                  check_sizes(
                      kOp, name, k, "[batch, num_kv_heads, slots, head_dim]",
                      {shape.batch, shape.num_kv_heads, shape.layers[i].slots, shape.head_dim});
                  check_dtype(kOp, name, k, {args.k_caches[0].scalar_type()});
                  check_same_device(kOp, name, k, "input", args.input);
                });
  }
  if (args.k_caches[0].is_meta()) return;
  check_caches_apart(args);
}

void check_rotation(const DecodeStepArgs& args, DecodeStepShape& shape) {
  const bool stacked = args.cos.dim() == 4;
  const char* layout = stacked ? "[tables, 1 or batch, new_tokens, rotary_dim]"
                               : "[1 or batch, new_tokens, rotary_dim]";
  shape.rope_tables = stacked ? args.cos.size(0) : 1;
  const auto [rows, tokens, rotary_dim] = dims<3>(
      kOp, "cos", stacked && shape.rope_tables > 0 ? args.cos.select(0, 0) : args.cos, layout);
  TORCH_CHECK_VALUE((rows == 1 || rows == shape.batch) && tokens == shape.new_tokens, kOp,
                    ": cos must be ", layout, " with batch ", shape.batch, " and new_tokens ",
                    shape.new_tokens, ", got ", args.cos.sizes());
  TORCH_CHECK_VALUE(rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= shape.head_dim, kOp,
                    ": cos must have an even rotary_dim of 2 to head_dim = ", shape.head_dim,
                    ", got ", rotary_dim);
  check_sizes(kOp, "sin", args.sin, layout, args.cos.sizes());
  check_float_dtype(kOp, "cos", args.cos);
  check_dtype(kOp, "sin", args.sin, {args.cos.scalar_type()});
  check_same_device(kOp, "cos", args.cos, "input", args.input);
  check_same_device(kOp, "sin", args.sin, "input", args.input);
  shape.rotary_dim = rotary_dim;
  for (size_t i = 0; i < shape.layers.size(); ++i) {
    const int64_t table = args.ropes.empty() ? 0 : args.ropes[i];
    TORCH_CHECK_VALUE(table >= -1 && table < shape.rope_tables, kOp, ": ropes[", i,
                      "] must be -1 to ", shape.rope_tables - 1, ", a table of cos, got ", table);
    shape.layers[i].rope_table = table;
  }
}

void check_options(const DecodeStepArgs& args, const DecodeStepShape& shape) {
  const auto is_finite = [](double x) { return std::isfinite(static_cast<float>(x)); };
  TORCH_CHECK_VALUE(is_finite(args.norm_eps) && args.norm_eps >= 0, kOp,
                    ": norm_eps must be finite as float32 and at least 0, got ", args.norm_eps);
  TORCH_CHECK_VALUE(!args.scale || is_finite(*args.scale), kOp,
                    ": scale must be finite as float32, got ", args.scale.value_or(0));
  for (const auto& [name, softcap] :
       {std::pair{"softcap", args.softcap}, std::pair{"logits_softcap", args.logits_softcap}}) {
    TORCH_CHECK_VALUE(!softcap || is_positive_float(*softcap), kOp, ": ", name,
                      " must be positive and finite as float32, got ", softcap.value_or(0));
  }
  for (const auto& [name, factor] : {std::pair{"norm_offset", args.norm_offset},
                                     std::pair{"residual_scale", args.residual_scale},
                                     std::pair{"embedding_scale", args.embedding_scale},
                                     std::pair{"logits_scale", args.logits_scale}}) {
    TORCH_CHECK_VALUE(is_finite(factor), kOp, ": ", name, " must be finite as float32, got ",
                      factor);
  }
  for (size_t i = 0; i < shape.layers.size(); ++i) {
    const DecodeStepLayer& layer = shape.layers[i];
    TORCH_CHECK_VALUE(!layer.ring || layer.window <= layer.slots - shape.new_tokens + 1, kOp,
                      ": windows[", i, "] + new_tokens - 1 must be at most the slots of the ring, ",
                      layer.slots, ", got window ", layer.window, " and new_tokens ",
                      shape.new_tokens);
  }
  check_per_sequence(kOp, "seq_lens", args.seq_lens, shape.batch, true);
  check_same_device(kOp, "seq_lens", args.seq_lens, "input", args.input);
  if (args.kv_start) {
    check_per_sequence(kOp, "kv_start", *args.kv_start, shape.batch, false);
    check_same_device(kOp, "kv_start", *args.kv_start, "input", args.input);
  }
}

// Of a model that begins with an embedding: the first norm that is there says it.
c10::SymInt hidden_size(const DecodeStepArgs& args) {
  for (const OptionalTensors* list : {&args.norms, &args.out_norms}) {
    for (size_t i = 0; i < list->size(); ++i) {
      const std::optional<at::Tensor> norm = (*list)[i];
      if (!norm) continue;
      TORCH_CHECK_VALUE(norm->dim() == 1, kOp, ": norms[0] must be [hidden_size], got shape ",
                        norm->sizes());
      return norm->sym_size(0);
    }
  }
  TORCH_CHECK_VALUE(false, kOp, ": norms must hold one at least with token ids, got none");
}

// What the lists of one element a layer say of each.
std::vector<DecodeStepLayer> layers_of(const DecodeStepArgs& args, size_t layers) {
  const auto wanted = static_cast<int64_t>(layers);
  check_count(kOp, "k_caches", args.k_caches.size(), wanted, "one a layer");
  check_count(kOp, "v_caches", args.v_caches.size(), wanted, "one a layer");
  if (args.k_scales) check_count(kOp, "k_scales", args.k_scales->size(), wanted, "one a layer");
  if (args.v_scales) check_count(kOp, "v_scales", args.v_scales->size(), wanted, "one a layer");
  for (const auto& [name, list] :
       {std::pair{"head_norms", &args.head_norms}, std::pair{"out_norms", &args.out_norms}}) {
    if (!list->empty()) check_count(kOp, name, list->size(), 2 * wanted, "2 a layer, or none");
  }
  if (!args.ropes.empty())
    check_count(kOp, "ropes", args.ropes.size(), wanted, "one a layer, or none");
  if (args.windows.size() > 1) {
    check_count(kOp, "windows", args.windows.size(), wanted, "one a layer, one for all, or none");
  }
  std::vector<DecodeStepLayer> out(layers);
  for (size_t i = 0; i < layers; ++i) {
    DecodeStepLayer& layer = out[i];
    if (!args.windows.empty()) layer.window = args.windows[args.windows.size() > 1 ? i : 0];
    TORCH_CHECK_VALUE(layer.window >= 0, kOp, ": windows[", i, "] must be at least 0, got ",
                      layer.window);
    layer.slots = dims<4>(kOp, c10::str("k_caches[", i, "]").c_str(), args.k_caches[i],
                          "[batch, num_kv_heads, slots, head_dim]")[2];
    layer.ring = args.ring && layer.window > 0;
  }
  return out;
}

// Sizes that the arguments state themselves, each within what products of sizes allow.
DecodeStepShape shape_of(const DecodeStepArgs& args) {
  check_given(kOp, "input", args.input);
  const bool ids = args.input.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE(ids == args.embedding.has_value(), kOp, ": embedding must ",
                    ids ? "be given with token ids, got None"
                        : "be None where input holds hidden states, got a tensor");
  TORCH_CHECK_VALUE(!args.weights.empty() && args.weights.size() % kDecoderMatrices == 0, kOp,
                    ": weights must have 6 elements a layer (q, k, v, o, gate_up, down), got ",
                    args.weights.size());
  DecodeStepShape shape{};
  const size_t layers = args.weights.size() / kDecoderMatrices;
  shape.layers = layers_of(args, layers);
  const size_t norms = args.norms.size();
  TORCH_CHECK_VALUE(norms == 2 * layers || norms == 2 * layers + 1, kOp,
                    ": norms must have 2 elements a layer, and may have the final norm behind "
                    "them: ",
                    2 * layers, " or ", 2 * layers + 1, ", got ", norms);
  shape.final_norm = norms % 2 == 1;
  if (ids) {
    const auto sizes = dims<2>(kOp, "input", args.input, "[batch, new_tokens]");
    shape.batch = sizes[0], shape.new_tokens = sizes[1];
    shape.hidden_size = hidden_size(args).expect_int();
  } else {
    check_float_dtype(kOp, "input", args.input);
    const auto sizes = dims<3>(kOp, "input", args.input, "[batch, new_tokens, hidden_size]");
    shape.batch = sizes[0], shape.new_tokens = sizes[1], shape.hidden_size = sizes[2];
    check_dense_last_dim(kOp, "input", args.input);
  }
  const auto cache =
      dims<4>(kOp, "k_caches[0]", args.k_caches[0], "[batch, num_kv_heads, slots, head_dim]");
  shape.num_kv_heads = cache[1], shape.head_dim = cache[3];
  shape.num_heads = args.num_heads;
  shape.intermediate_size = args.intermediate_size;
  constexpr int64_t kMost = int64_t{1} << 24;
  for (const auto& [name, size] : {std::pair{"hidden_size of input or norms", shape.hidden_size},
                                   std::pair{"num_heads", shape.num_heads},
                                   std::pair{"num_kv_heads of k_caches", shape.num_kv_heads},
                                   std::pair{"head_dim of k_caches", shape.head_dim},
                                   std::pair{"intermediate_size", shape.intermediate_size}}) {
    TORCH_CHECK_VALUE(size >= 1 && size <= kMost, kOp, ": ", name, " must be 1 to 2^24, got ",
                      size);
  }
  TORCH_CHECK_VALUE(shape.num_heads % shape.num_kv_heads == 0, kOp,
                    ": num_heads must be a multiple of num_kv_heads = ", shape.num_kv_heads,
                    ", got ", shape.num_heads);
  TORCH_CHECK_VALUE(shape.new_tokens * (shape.num_heads / shape.num_kv_heads) <= kMaxStepRows, kOp,
                    ": input must have at most ", kMaxStepRows,
                    " rows a KV head (new_tokens * num_heads / num_kv_heads), got ",
                    shape.new_tokens * (shape.num_heads / shape.num_kv_heads));
  return shape;
}

at::Tensor decode_step_meta(const DecodeStepArgs& args, bool argmax) {
  const bool symbolic = has_symbolic_sizes(args.input) || has_symbolic_sizes(args.cos) ||
                        (!args.k_caches.empty() && has_symbolic_sizes(args.k_caches[0]));
  if (!symbolic) check_decode_step(args);
  return empty_decode_step_result(args, argmax);
}

using Meta = DecodeStepEntry<decode_step_meta>;

}  // namespace

int64_t DecodeStepShape::rows(int matrix) const {
  switch (matrix) {
    case kQ:
      return num_heads * head_dim;
    case kK:
    case kV:
      return num_kv_heads * head_dim;
    case kGateUp:
      return intermediate_size;
    default:
      return hidden_size;
  }
}

int64_t DecodeStepShape::cols(int matrix) const {
  switch (matrix) {
    case kO:
      return num_heads * head_dim;
    case kDown:
      return intermediate_size;
    default:
      return hidden_size;
  }
}

DecodeStepShape check_decode_step(const DecodeStepArgs& args) {
  DecodeStepShape shape = shape_of(args);
  check_decode_step_parameters(args, shape);
  check_all_caches(args, shape);
  check_rotation(args, shape);
  check_options(args, shape);
  shape.activation = check_activation(kOp, args.activation);
  return shape;
}

void check_decode_step_token(const DecodeStepArgs& args, DecodeStepShape& shape) {
  if (!args.embedding) check_dense_last_dim(kOp, "input", args.input);
  check_rotation(args, shape);
  check_options(args, shape);
}

DecodeStepPositions check_decode_step_values(const DecodeStepArgs& args,
                                             const DecodeStepShape& shape) {
  DecodeStepPositions at;
  at.seq_lens = per_sequence(args.seq_lens, shape.batch);
  const DecodeStepLayer* checked = nullptr;
  for (const DecodeStepLayer& layer : shape.layers) {
    if (checked && checked->slots == layer.slots && checked->ring == layer.ring) continue;
    check_seq_lens_values(kOp, at.seq_lens, shape.new_tokens, layer.slots, layer.ring);
    checked = &layer;
  }
  at.kv_start = args.kv_start ? per_sequence(*args.kv_start, shape.batch)
                              : std::vector<int64_t>(static_cast<size_t>(shape.batch), 0);
  for (int64_t b = 0; b < shape.batch; ++b) {
    at.kv_start[b] = std::clamp<int64_t>(at.kv_start[b], 0, at.seq_lens[b] + shape.new_tokens);
  }
  if (!args.embedding) return at;
  const at::Tensor dense = args.input.contiguous();
  const int64_t* ids = dense.const_data_ptr<int64_t>();
  at.ids.assign(ids, ids + dense.numel());
  for (const int64_t id : at.ids) {
    TORCH_CHECK_VALUE(id >= 0 && id < args.vocab_size, kOp, ": input must hold token ids of 0 to ",
                      args.vocab_size - 1, ", got ", id);
  }
  return at;
}

at::Tensor empty_decode_step_result(const DecodeStepArgs& args, bool argmax) {
  TORCH_CHECK_VALUE(!argmax || args.lm_head, kOp, ": lm_head must be given for argmax, got None");
  const bool ids = args.input.scalar_type() == at::kLong;
  std::vector<c10::SymInt> sizes{args.input.sym_size(0), args.input.sym_size(1)};
  if (args.lm_head && !argmax) {
    sizes.emplace_back(args.vocab_size);
  } else if (!argmax) {
    sizes.push_back(ids ? hidden_size(args) : args.input.sym_size(2));
  }
  return at::empty_symint(
      sizes, args.input.options().dtype(argmax ? at::kLong : at::kFloat).requires_grad(false));
}

TORCH_LIBRARY_IMPL(fasttps, Meta, m) {
  m.impl("decode_step", Meta::impl<false>);
  m.impl("decode_step.argmax", Meta::impl<true>);
}

}  // namespace fasttps
