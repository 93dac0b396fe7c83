#include "../../ops/decode_step.h"

#include <torch/library.h>

#include "../../ops/decode_step_entry.h"
#include "decoder_model.h"

namespace fasttps::cpu {
namespace {

at::Tensor decode_step(const DecodeStepArgs& args, bool argmax) {
  const DecodeStepShape shape = check_decode_step(args);
  DecoderModel model = decoder_model(args, shape);
  return run_decode_step(args, shape, model, argmax);
}

using Cpu = DecodeStepEntry<decode_step>;

TORCH_LIBRARY_IMPL(fasttps, CPU, m) {
  m.impl("decode_step", Cpu::impl<false>);
  m.impl("decode_step.argmax", Cpu::impl<true>);
}

}  // namespace
}  // namespace fasttps::cpu
