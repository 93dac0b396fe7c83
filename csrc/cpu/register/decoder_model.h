#pragma once
#include <deque>
#include <vector>

#include "../../ops/decode_step.h"
#include "decoder.h"

// The part of a decode_step that stays the same from token to token, as the decoder reads it: it
// points into the tensors of the arguments, which must outlive it.
namespace fasttps::cpu {

using Floats = std::vector<float>;

// Elements of a float tensor, dense, in f32.
Floats rows_f32(const at::Tensor& t);

struct DecoderModel {
  std::vector<DecoderLayer> layers;
  PackedMatrix embedding, lm_head;  // kernels null: none
  bool has_final_norm = false;
  NormWeight final_norm{};
  std::deque<Floats> biases;                 // in f32, padded to whole panels
  std::vector<std::vector<int32_t>> orders;  // of columns
};

// Of arguments that have been checked.
DecoderModel decoder_model(const DecodeStepArgs& args, const DecodeStepShape& shape);

// Takes the values of the biases anew.
void load_biases(const DecodeStepArgs& args, DecoderModel& model);

// One step of checked arguments through their model: the op itself. Checks what lies in memory.
at::Tensor run_decode_step(const DecodeStepArgs& args, const DecodeStepShape& shape,
                           DecoderModel& model, bool argmax);

}  // namespace fasttps::cpu
