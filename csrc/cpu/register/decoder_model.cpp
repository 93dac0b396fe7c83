#include "decoder_model.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "../dispatch.h"
#include "../element_type.h"

namespace fasttps::cpu {
namespace {

constexpr int64_t kNoWindow = int64_t{1} << 61;

PackedMatrix matrix(const at::Tensor& packed, PackedFormat format, int64_t rows, int64_t cols,
                    int64_t group_size, bool int8_activation, int64_t halves = 1) {
  PackedMatrix m;
  m.packed = packed.const_data_ptr();
  m.format = static_cast<int>(format);
  m.kernels = &linear_kernels(m.format)[int8_activation ? 1 : 0];
  m.rows = rows;
  m.cols = cols;
  m.cols_padded = packed_cols(format, cols, group_size);
  m.group_size = group_size;
  m.panel_bytes = halves * packed_panel_bytes(format, cols, group_size);
  m.panels = packed_panels(rows);
  return m;
}

CacheView cache_view(const at::Tensor& cache, const std::optional<at::TensorList>& scales,
                     size_t layer) {
  CacheView view{cache.mutable_data_ptr(),
                 cache.stride(0),
                 cache.stride(1),
                 cache.stride(2),
                 nullptr,
                 0,
                 0,
                 0};
  if (scales) {
    const at::Tensor& scale = (*scales)[layer];
    view.scale = scale.mutable_data_ptr<float>();
    view.scale_batch_stride = scale.stride(0);
    view.scale_head_stride = scale.stride(1);
    view.scale_slot_stride = scale.stride(2);
  }
  return view;
}

NormWeight norm_weight(const OptionalTensors& norms, size_t at) {
  if (at >= norms.size()) return {};
  const std::optional<at::Tensor> weight = norms[at];
  if (!weight) return {};
  return {weight->const_data_ptr(), element_type(*weight)};
}

HeadNorm head_norm(const DecodeStepArgs& args, const DecodeStepShape& shape, size_t at) {
  if (args.head_norms.empty()) return {};
  const std::optional<at::Tensor> weight = args.head_norms[at];
  if (!weight) return {};
  return {norm_weight(args.head_norms, at), weight->numel() != shape.head_dim};
}

std::optional<at::Tensor> bias_of(const DecodeStepArgs& args, size_t at) {
  return args.biases.empty() ? std::nullopt
                             : static_cast<std::optional<at::Tensor>>(args.biases[at]);
}

// Room for the bias in f32, zero up to whole panels; null if there is none.
const float* bias_room(const DecodeStepArgs& args, size_t layer, int which,
                       std::deque<Floats>& biases) {
  const auto bias = bias_of(args, layer * kDecoderBiases + static_cast<size_t>(which));
  if (!bias) return nullptr;
  biases.emplace_back(static_cast<size_t>(packed_panels(bias->size(0)) * kPanelRows), 0.0f);
  return biases.back().data();
}

// The orders of columns; throws ValueError for one that names a column which is not there.
std::vector<std::vector<int32_t>> orders_of(const DecodeStepArgs& args) {
  std::vector<std::vector<int32_t>> orders;
  if (args.columns.empty() || !args.orders) return orders;
  for (const at::Tensor& order : *args.orders) {
    const int64_t* from = order.const_data_ptr<int64_t>();
    const int64_t count = order.numel();
    for (int64_t i = 0; i < count; ++i) {
      TORCH_CHECK_VALUE(from[i] >= 0 && from[i] < count, "decode_step: orders[", orders.size(),
                        "] must hold columns of 0 to ", count - 1, ", got ", from[i]);
    }
    orders.emplace_back(from, from + count);
  }
  return orders;
}

DecoderLayer decoder_layer(const DecodeStepArgs& args, const DecodeStepShape& shape, size_t layer,
                           DecoderModel& model) {
  std::deque<Floats>& biases = model.biases;
  const auto weight = [&](int which, int bias, int64_t halves = 1) {
    const size_t i = layer * kDecoderMatrices + static_cast<size_t>(which);
    PackedMatrix m = matrix(args.weights[i], shape.formats[i], shape.rows(which), shape.cols(which),
                            args.group_sizes[i], args.int8_activation, halves);
    m.bias = bias_room(args, layer, bias, biases);
    if (!args.columns.empty() && args.columns[i] >= 0) {
      m.order = model.orders[static_cast<size_t>(args.columns[i])].data();
    }
    return m;
  };
  DecoderLayer out;
  out.input_norm = norm_weight(args.norms, 2 * layer);
  out.post_norm = norm_weight(args.norms, 2 * layer + 1);
  out.attention_out_norm = norm_weight(args.out_norms, 2 * layer);
  out.mlp_out_norm = norm_weight(args.out_norms, 2 * layer + 1);
  out.q_norm = head_norm(args, shape, 2 * layer);
  out.k_norm = head_norm(args, shape, 2 * layer + 1);
  const DecodeStepLayer& own = shape.layers[layer];
  // No two positions of a cache lie so far apart.
  out.window = own.window > 0 && (own.ring || own.window < own.slots) ? own.window : kNoWindow;
  out.ring = own.ring ? own.slots : 0;
  out.q = weight(kQ, kBiasQ);
  out.k = weight(kK, kBiasK);
  out.v = weight(kV, kBiasV);
  out.o = weight(kO, kBiasO);
  out.gate_up = weight(kGateUp, kBiasGate, 2);
  out.gate_up.up_bias = bias_room(args, layer, kBiasUp, biases);
  out.down = weight(kDown, kBiasDown);
  out.k_cache = cache_view(args.k_caches[layer], args.k_scales, layer);
  out.v_cache = cache_view(args.v_caches[layer], args.v_scales, layer);
  return out;
}

// Threads that pay for their barriers: one for every 32 KiB of a layer's weights.
int64_t worthwhile_threads(const DecoderStep& step) {
  if (at::in_parallel_region()) return 1;
  int64_t bytes = 0;
  const DecoderLayer& l = step.layers.front();
  for (const PackedMatrix* m : {&l.q, &l.k, &l.v, &l.o, &l.gate_up, &l.down}) {
    bytes += m->panels * m->panel_bytes;
  }
  return std::clamp<int64_t>(bytes / 32768, 1, at::get_num_threads());
}

}  // namespace

Floats rows_f32(const at::Tensor& t) {
  const at::Tensor dense = t.contiguous();
  Floats out(static_cast<size_t>(dense.numel()));
  kernels().load_row[element_type(dense)](dense.const_data_ptr(), out.data(), dense.numel());
  return out;
}

DecoderModel decoder_model(const DecodeStepArgs& args, const DecodeStepShape& shape) {
  DecoderModel model;
  model.orders = orders_of(args);
  for (size_t layer = 0; layer < args.k_caches.size(); ++layer) {
    model.layers.push_back(decoder_layer(args, shape, layer, model));
  }
  if (args.embedding) {
    model.embedding = matrix(*args.embedding, static_cast<PackedFormat>(args.embedding_format),
                             args.vocab_size, shape.hidden_size, args.embedding_group_size, false);
  }
  if (args.lm_head) {
    model.lm_head =
        matrix(*args.lm_head, static_cast<PackedFormat>(args.lm_head_format), args.vocab_size,
               shape.hidden_size, args.lm_head_group_size, args.int8_activation);
  }
  model.has_final_norm = shape.final_norm;
  if (shape.final_norm) model.final_norm = norm_weight(args.norms, args.norms.size() - 1);
  load_biases(args, model);
  return model;
}

void load_biases(const DecodeStepArgs& args, DecoderModel& model) {
  auto room = model.biases.begin();
  for (size_t i = 0; i < args.biases.size(); ++i) {
    const auto bias = bias_of(args, i);
    if (!bias) continue;
    kernels().load_row[element_type(*bias)](bias->const_data_ptr(), room->data(), bias->numel());
    ++room;
  }
}

at::Tensor run_decode_step(const DecodeStepArgs& args, const DecodeStepShape& shape,
                           DecoderModel& model, bool argmax) {
  const DecodeStepPositions at = check_decode_step_values(args, shape);
  at::Tensor out = empty_decode_step_result(args, argmax);
  if (args.input.numel() == 0) return out;

  const Floats cos = rows_f32(args.cos), sin = rows_f32(args.sin);
  const auto floats = args.input.options().dtype(at::kFloat).requires_grad(false);
  DecoderStep step{};
  step.batch = shape.batch;
  step.new_tokens = shape.new_tokens;
  step.hidden_size = shape.hidden_size;
  step.intermediate_size = shape.intermediate_size;
  step.num_heads = shape.num_heads;
  step.num_kv_heads = shape.num_kv_heads;
  step.head_dim = shape.head_dim;
  step.cache_type = element_type(args.k_caches[0]);
  step.norm_eps = static_cast<float>(args.norm_eps);
  step.scale = args.scale.value_or(1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
  step.softcap = static_cast<float>(args.softcap.value_or(0.0));
  step.norm_offset = static_cast<float>(args.norm_offset);
  step.residual_scale = static_cast<float>(args.residual_scale);
  step.activation = static_cast<Activation>(shape.activation);
  step.interleaved = args.interleaved;
  step.rotary_dim = shape.rotary_dim;
  step.cos = cos.data();
  step.sin = sin.data();
  const int64_t rope_rows = args.cos.size(-3);
  step.rope_batch_stride = rope_rows > 1 ? shape.new_tokens * shape.rotary_dim : 0;
  step.rope_table_stride = rope_rows * shape.new_tokens * shape.rotary_dim;
  step.seq_lens = at.seq_lens.data();
  step.kv_start = at.kv_start.data();
  for (size_t i = 0; i < model.layers.size(); ++i) {
    model.layers[i].rope_table = shape.layers[i].rope_table;
  }
  step.layers = model.layers;
  at::Tensor logits;  // outlives the step
  const bool x_is_out = !args.lm_head;
  const at::Tensor x = x_is_out ? out : at::empty({step.tokens() * shape.hidden_size}, floats);
  step.x = x.mutable_data_ptr<float>();
  if (args.embedding) {
    step.ids = at.ids.data();
    step.embedding = model.embedding;
    step.embedding_scale = static_cast<float>(args.embedding_scale);
  } else {
    const at::Tensor rows = args.input.contiguous();
    kernels().load_row[element_type(rows)](rows.const_data_ptr(), step.x, rows.numel());
  }
  if (model.has_final_norm) step.final_norm = &model.final_norm;
  if (args.lm_head) {
    step.lm_head = model.lm_head;
    logits = argmax ? at::empty({step.tokens() * args.vocab_size}, floats) : out;
    step.logits = logits.mutable_data_ptr<float>();
    step.logits_scale = static_cast<float>(args.logits_scale);
    step.logits_softcap = static_cast<float>(args.logits_softcap.value_or(0.0));
    if (argmax) step.argmax = out.mutable_data_ptr<int64_t>();
  }
  run_decoder_step(step, kernels(), worthwhile_threads(step));
  return out;
}

}  // namespace fasttps::cpu
