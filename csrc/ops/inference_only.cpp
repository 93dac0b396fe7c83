#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

// Every op is inference only. Asking for a gradient is an error that names the argument.
namespace fasttps {
namespace {

bool wants_gradient(const at::Tensor& t) {
  if (!t.defined()) return false;
  return (at::GradMode::is_enabled() && t.requires_grad()) || t._fw_grad(/*level=*/0).defined();
}

void check_needs_no_grad(const c10::OperatorHandle& op, const std::string& arg,
                         const c10::IValue& value) {
  if (value.isTensor()) {
    TORCH_CHECK(!wants_gradient(value.toTensor()),
                op.schema().name().substr(sizeof("fasttps::") - 1), ": ", arg,
                " requires a gradient, and the op is inference only; call it under "
                "torch.no_grad() or detach the argument");
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorList()) check_needs_no_grad(op, arg, t);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> t : value.toOptionalTensorList()) {
      if (t) check_needs_no_grad(op, arg, *t);
    }
  }
}

void inference_only(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    check_needs_no_grad(op, arguments[i].name(), (*stack)[first + i]);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

TORCH_LIBRARY_IMPL(fasttps, Autograd, m) {
  for (const char* op :
       {"kv_cache_update_", "rope_attention_decode", "rope_attention_decode.lse", "causal_prefill",
        "causal_prefill.lse", "merge_attention", "gate_up_silu_mlp", "packed_linear",
        "packed_embedding", "pack_weight", "pack_gguf", "pack_gguf.out", "pack_quants",
        "unpack_weight", "pack_gate_up", "unpack_gate_up", "decode_step", "decode_step.argmax"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&inference_only>());
  }
}

}  // namespace
}  // namespace fasttps
