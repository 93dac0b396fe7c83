#include <ATen/record_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../ops/check.h"
#include "../dispatch.h"
#include "decoder_model.h"

namespace fasttps::cpu {
namespace {

using Tensors = std::vector<at::Tensor>;

// What of a tensor the bound step rests on.
struct Look {
  const void* data;
  int64_t numel;
  at::ScalarType type;
  std::array<int64_t, 4> sizes, strides;  // of tensors of up to four dimensions

  explicit Look(const at::Tensor& t)
      : data(t.const_data_ptr()), numel(t.numel()), type(t.scalar_type()), sizes{}, strides{} {
    const auto dims = static_cast<size_t>(std::min<int64_t>(t.dim(), 4));
    std::copy_n(t.sizes().begin(), dims, sizes.begin());
    std::copy_n(t.strides().begin(), dims, strides.begin());
  }
  bool operator==(const Look&) const = default;
};

// The arguments of decode_step that stay from token to token, in torch.classes' order.
struct DecodeStepBindings {
  Tensors weights;
  OptionalTensors norms, biases, head_norms, out_norms;
  Tensors k_caches, v_caches;
  std::vector<int64_t> formats, group_sizes;
  int64_t num_heads, intermediate_size;
  double norm_eps;
  bool int8_activation;
  std::string activation;
  bool interleaved;
  std::optional<double> scale;
  std::vector<int64_t> windows;
  bool ring;
  std::optional<Tensors> k_scales, v_scales;
  double norm_offset;
  std::vector<int64_t> ropes;
  std::optional<Tensors> orders;
  std::vector<int64_t> columns;
  std::optional<double> softcap;
  double residual_scale;
  std::optional<at::Tensor> embedding;
  int64_t embedding_format, embedding_group_size;
  double embedding_scale;
  std::optional<at::Tensor> lm_head;
  int64_t lm_head_format, lm_head_group_size, vocab_size;
  double logits_scale;
  std::optional<double> logits_softcap;
};

// decode_step with its weights and caches bound: torch.classes.fasttps.DecodeStep. The op takes
// hundreds of tensors apart for every token, none of them in a cache of the CPU after a token's
// weights have passed through; this takes them apart once, and then looks at each whether it is
// still the memory that it was. If one is not, or the input has another shape, it begins anew.
struct BoundDecodeStep : torch::CustomClassHolder {
  template <class... Bindings>
  explicit BoundDecodeStep(Bindings&&... bindings) : bound_{std::forward<Bindings>(bindings)...} {}

  at::Tensor run(const at::Tensor& input, const at::Tensor& seq_lens, const at::Tensor& cos,
                 const at::Tensor& sin, const std::optional<at::Tensor>& kv_start, bool argmax) {
    for (const auto& [arg, t] : {std::pair{"input", &input}, std::pair{"seq_lens", &seq_lens},
                                 std::pair{"cos", &cos}, std::pair{"sin", &sin}}) {
      check_given("decode_step", arg, *t);
    }
    TORCH_CHECK_TYPE(input.is_cpu(), "decode_step: input must be on cpu, got ", input.device());
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "decode_step: DecodeStep has no gradient and wants them off: call it under "
                "torch.no_grad() or torch.inference_mode(); they are on");
    RECORD_FUNCTION("fasttps::decode_step", c10::ArrayRef<const c10::IValue>{});  // as the op's
    const std::lock_guard lock(mutex_);
    const DecodeStepArgs args = this->args(input, seq_lens, cos, sin, kv_start);
    if (is_bound_to(input)) {
      check_decode_step_token(args, shape_);
      load_biases(args, model_);
    } else {
      input_sizes_.reset();
      shape_ = check_decode_step(args);
      model_ = decoder_model(args, shape_);
      looks_.clear();
      for_each_tensor([&](const at::Tensor& t) { looks_.emplace_back(t); });
      isa_ = &kernels();
      bf16_ = &linear_kernels(static_cast<int64_t>(PackedFormat::kBf16));
      input_type_ = input.scalar_type();
      input_sizes_ = input.sizes().vec();
    }
    return run_decode_step(args, shape_, model_, argmax);
  }

 private:
  DecodeStepArgs args(const at::Tensor& input, const at::Tensor& seq_lens, const at::Tensor& cos,
                      const at::Tensor& sin, const std::optional<at::Tensor>& kv_start) const {
    const auto list = [](const std::optional<Tensors>& tensors) {
      return tensors ? std::optional<at::TensorList>(*tensors) : std::nullopt;
    };
    return {input,
            bound_.weights,
            bound_.norms,
            bound_.biases,
            bound_.head_norms,
            bound_.out_norms,
            bound_.k_caches,
            bound_.v_caches,
            seq_lens,
            cos,
            sin,
            bound_.formats,
            bound_.group_sizes,
            bound_.num_heads,
            bound_.intermediate_size,
            bound_.norm_eps,
            bound_.int8_activation,
            bound_.activation,
            bound_.interleaved,
            bound_.scale,
            bound_.windows,
            bound_.ring,
            kv_start,
            list(bound_.k_scales),
            list(bound_.v_scales),
            bound_.norm_offset,
            bound_.ropes,
            list(bound_.orders),
            bound_.columns,
            bound_.softcap,
            bound_.residual_scale,
            bound_.embedding,
            bound_.embedding_format,
            bound_.embedding_group_size,
            bound_.embedding_scale,
            bound_.lm_head,
            bound_.lm_head_format,
            bound_.lm_head_group_size,
            bound_.vocab_size,
            bound_.logits_scale,
            bound_.logits_softcap};
  }

  template <class Function>
  void for_each_tensor(const Function& function) const {
    const auto each = [&](const Tensors& tensors) {
      for (const at::Tensor& t : tensors) function(t);
    };
    each(bound_.weights);
    for (const OptionalTensors* list :
         {&bound_.norms, &bound_.biases, &bound_.head_norms, &bound_.out_norms}) {
      for (size_t i = 0; i < list->size(); ++i) {
        if (const std::optional<at::Tensor> t = (*list)[i]) function(*t);
      }
    }
    each(bound_.k_caches);
    each(bound_.v_caches);
    if (bound_.k_scales) each(*bound_.k_scales);
    if (bound_.v_scales) each(*bound_.v_scales);
    if (bound_.orders) each(*bound_.orders);
    if (bound_.embedding) function(*bound_.embedding);
    if (bound_.lm_head) function(*bound_.lm_head);
  }

  bool is_bound_to(const at::Tensor& input) const {
    if (!input_sizes_ || input.sizes() != *input_sizes_ || input.scalar_type() != input_type_ ||
        isa_ != &kernels() || bf16_ != &linear_kernels(static_cast<int64_t>(PackedFormat::kBf16))) {
      return false;
    }
    auto look = looks_.begin();
    bool same = true;
    for_each_tensor([&](const at::Tensor& t) { same &= Look(t) == *look++; });
    return same;
  }

  const DecodeStepBindings bound_;
  std::mutex mutex_;
  DecodeStepShape shape_{};
  DecoderModel model_;
  std::vector<Look> looks_;
  const KernelTable* isa_ = nullptr;
  const PackedLinearRow* bf16_ = nullptr;
  std::optional<std::vector<int64_t>> input_sizes_;  // nullopt: bound to nothing
  at::ScalarType input_type_{};
};

TORCH_LIBRARY_FRAGMENT(fasttps, m) {
  m.class_<BoundDecodeStep>("DecodeStep")
      .def(torch::init<Tensors, OptionalTensors, OptionalTensors, OptionalTensors, OptionalTensors,
                       Tensors, Tensors, std::vector<int64_t>, std::vector<int64_t>, int64_t,
                       int64_t, double, bool, std::string, bool, std::optional<double>,
                       std::vector<int64_t>, bool, std::optional<Tensors>, std::optional<Tensors>,
                       double, std::vector<int64_t>, std::optional<Tensors>, std::vector<int64_t>,
                       std::optional<double>, double, std::optional<at::Tensor>, int64_t, int64_t,
                       double, std::optional<at::Tensor>, int64_t, int64_t, int64_t, double,
                       std::optional<double>>())
      .def("run", &BoundDecodeStep::run);
}

}  // namespace
}  // namespace fasttps::cpu
