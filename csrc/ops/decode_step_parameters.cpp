#include <array>

#include "check.h"
#include "decode_step.h"

namespace fasttps {
namespace {

constexpr const char* kOp = "decode_step";
constexpr std::array<const char*, kDecoderMatrices> kMatrixNames{"q", "k",       "v",
                                                                 "o", "gate_up", "down"};
constexpr std::array<const char*, kDecoderBiases> kBiasNames{"q",    "k",  "v",   "o",
                                                             "gate", "up", "down"};

// A list argument's element as errors name it: weights[7] (layer 1, k).
std::string element_name(const char* list, size_t at, int64_t layer, const char* what) {
  return c10::str(list, "[", at, "] (layer ", layer, ", ", what, ")");
}

// Of each norm that is there, its size: one of `sizes(i)`.
template <class Sizes>
void check_norms(const char* list, const OptionalTensors& norms, const char* layout,
                 const Sizes& sizes, const at::Tensor& input) {
  for (size_t i = 0; i < norms.size(); ++i) {
    const std::optional<at::Tensor> norm = norms[i];
    if (!norm) continue;
    check_named([&] { return c10::str(list, "[", i, "]"); },
                [&](const char* name) {
                  const auto [one, other] = sizes(i);
                  if (norm->sizes() != at::IntArrayRef{other}) {
                    check_sizes(kOp, name, *norm, layout, {one});
                  }
                  check_float_dtype(kOp, name, *norm);
                  check_dense_last_dim(kOp, name, *norm);
                  check_same_device(kOp, name, *norm, "input", input);
                });
  }
}

void check_all_norms(const DecodeStepArgs& args, const DecodeStepShape& shape) {
  const auto hidden = [&](size_t) { return std::pair{shape.hidden_size, shape.hidden_size}; };
  check_norms("norms", args.norms, "[hidden_size]", hidden, args.input);
  check_norms("out_norms", args.out_norms, "[hidden_size]", hidden, args.input);
  const auto heads = [&](size_t i) {
    const int64_t heads = i % 2 == 0 ? shape.num_heads : shape.num_kv_heads;
    return std::pair{shape.head_dim, heads * shape.head_dim};
  };
  check_norms("head_norms", args.head_norms, "[head_dim] or [heads * head_dim]", heads, args.input);
}

void check_weights(const DecodeStepArgs& args, DecodeStepShape& shape) {
  const auto weights = static_cast<int64_t>(args.weights.size());
  check_count(kOp, "formats", args.formats.size(), weights, "6 a layer");
  check_count(kOp, "group_sizes", args.group_sizes.size(), weights, "6 a layer");
  shape.formats.resize(args.weights.size());
  for (size_t i = 0; i < args.weights.size(); ++i) {
    const int matrix = static_cast<int>(i % kDecoderMatrices);
    const int64_t layer = static_cast<int64_t>(i) / kDecoderMatrices;
    shape.formats[i] = check_format(kOp, "formats", args.formats[i]);
    const int64_t halves = matrix == kGateUp ? 2 : 1;
    check_named([&] { return element_name("weights", i, layer, kMatrixNames[matrix]); },
                [&](const char* name) {
                  check_packed(kOp, name, args.weights[i], shape.formats[i],
                               halves * packed_panels(shape.rows(matrix)), shape.cols(matrix),
                               args.group_sizes[i]);
                  check_same_device(kOp, name, args.weights[i], "input", args.input);
                });
  }
}

void check_orders(const DecodeStepArgs& args, const DecodeStepShape& shape) {
  if (args.columns.empty()) return;
  check_count(kOp, "columns", args.columns.size(), static_cast<int64_t>(args.weights.size()),
              "6 a layer, or none");
  const auto orders = args.orders ? static_cast<int64_t>(args.orders->size()) : 0;
  for (size_t i = 0; i < args.columns.size(); ++i) {
    const int matrix = static_cast<int>(i % kDecoderMatrices);
    const int64_t at = args.columns[i];
    TORCH_CHECK_VALUE(at >= -1 && at < (matrix == kDown ? 0 : orders), kOp, ": columns[", i,
                      "] must be -1", matrix == kDown ? " for down" : ", or one of orders",
                      ", got ", at);
    if (at < 0) continue;
    const at::Tensor& order = (*args.orders)[static_cast<size_t>(at)];
    check_named([&] { return c10::str("orders[", at, "]"); },
                [&](const char* name) {
                  check_sizes(kOp, name, order, "[cols]", {shape.cols(matrix)});
                  check_dtype(kOp, name, order, {at::kLong});
                  check_dense_last_dim(kOp, name, order);
                  check_same_device(kOp, name, order, "input", args.input);
                });
  }
}

void check_biases(const DecodeStepArgs& args, const DecodeStepShape& shape) {
  if (args.biases.empty()) return;
  check_count(kOp, "biases", args.biases.size(), shape.layer_count() * kDecoderBiases,
              "7 a layer, or none");
  constexpr std::array<int, kDecoderBiases> kMatrixOf{kQ, kK, kV, kO, kGateUp, kGateUp, kDown};
  for (size_t i = 0; i < args.biases.size(); ++i) {
    const std::optional<at::Tensor> bias = args.biases[i];
    if (!bias) continue;
    const int which = static_cast<int>(i % kDecoderBiases);
    const std::string name =
        element_name("biases", i, static_cast<int64_t>(i) / kDecoderBiases, kBiasNames[which]);
    check_sizes(kOp, name.c_str(), *bias, "[rows]", {shape.rows(kMatrixOf[which])});
    check_float_dtype(kOp, name.c_str(), *bias);
    check_dense_last_dim(kOp, name.c_str(), *bias);
    check_same_device(kOp, name.c_str(), *bias, "input", args.input);
  }
}

void check_end(const char* arg, const std::optional<at::Tensor>& packed, int64_t format,
               int64_t group_size, const DecodeStepArgs& args, const DecodeStepShape& shape) {
  if (!packed) return;
  TORCH_CHECK_VALUE(args.vocab_size >= 1 && args.vocab_size <= (int64_t{1} << 40), kOp,
                    ": vocab_size must be at least 1 with ", arg, ", got ", args.vocab_size);
  check_packed(kOp, arg, *packed, check_format(kOp, c10::str(arg, "_format").c_str(), format),
               packed_panels(args.vocab_size), shape.hidden_size, group_size);
  check_same_device(kOp, arg, *packed, "input", args.input);
}

}  // namespace

void check_decode_step_parameters(const DecodeStepArgs& args, DecodeStepShape& shape) {
  check_all_norms(args, shape);
  check_weights(args, shape);
  check_biases(args, shape);
  check_orders(args, shape);
  check_end("embedding", args.embedding, args.embedding_format, args.embedding_group_size, args,
            shape);
  check_end("lm_head", args.lm_head, args.lm_head_format, args.lm_head_group_size, args, shape);
}

}  // namespace fasttps
