#pragma once
#include "matvec.h"

namespace fasttps::npu {

// A gated MLP for one token (paper 000, section 3.2, Fusion MLP):
//   output = down (act(gate x) * (up x))
// gate and up are one matrix of half tiles in turn, so that activation and product happen where the
// sums are: of the activations only x and act(gate x) * up x pass through L3, two in place of the
// seven of the layer-by-layer form.
// Arguments: input [hidden_size] (in), gate_up, down (in; pack_matvec), inner [intermediate_size]
// (in and out, the array's own), output [hidden_size] (out); vectors bf16, input and inner of
// MatvecTiling::vector_bytes.
struct GateUpSiluMlpSizes {
  int64_t hidden_size;
  int64_t intermediate_size;
  TileFormat format = TileFormat::kBf16;
  int64_t group_size = 0;
  int activation = 0;  // 0 silu, 1 gelu, 2 gelu_tanh
};

struct LoweredMatvec {
  Program program;
  MatvecTiling tiling;
};

LoweredMatvec lower_gate_up_silu_mlp(const GateUpSiluMlpSizes& sizes, const Machine& machine);

}  // namespace fasttps::npu
