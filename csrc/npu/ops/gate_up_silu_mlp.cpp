#include "gate_up_silu_mlp.h"

#include "sizes.h"

namespace fasttps::npu {

LoweredMatvec lower_gate_up_silu_mlp(const GateUpSiluMlpSizes& sizes, const Machine& machine) {
  constexpr const char* kOp = "gate_up_silu_mlp";
  enum { kInput, kGateUp, kDown, kInner, kOutput };
  check_sizes(kOp,
              {{"hidden_size", sizes.hidden_size}, {"intermediate_size", sizes.intermediate_size}});
  check_tile_format(kOp, sizes.format, sizes.group_size);
  if (sizes.activation < 0 || sizes.activation > 2) {
    throw std::invalid_argument(std::string(kOp) + ": wanted an activation of 0 to 2, got " +
                                std::to_string(sizes.activation));
  }
  const std::vector<MatvecPhase> phases{{.name = "gate_up",
                                         .rows = 2 * sizes.intermediate_size,
                                         .cols = sizes.hidden_size,
                                         .gated = true,
                                         .activation = sizes.activation,
                                         .vector = kInput,
                                         .weights = kGateUp,
                                         .result = kInner},
                                        {.name = "down",
                                         .rows = sizes.hidden_size,
                                         .cols = sizes.intermediate_size,
                                         .vector = kInner,
                                         .weights = kDown,
                                         .result = kOutput}};
  LoweredMatvec made;
  made.tiling = tile_matvec(kOp, phases, sizes.format, sizes.group_size, machine);
  made.program.name = kOp;
  made.program.arguments = {
      {"input", made.tiling.vector_bytes(sizes.hidden_size), Access::kIn},
      {"gate_up", made.tiling.matrix_bytes(phases[0].rows, phases[0].cols), Access::kIn},
      {"down", made.tiling.matrix_bytes(phases[1].rows, phases[1].cols), Access::kIn},
      {"inner", made.tiling.vector_bytes(sizes.intermediate_size), Access::kInOut},
      {"output", sizes.hidden_size * 2, Access::kOut}};
  add_matvec(made.program, phases, made.tiling);
  return made;
}

}  // namespace fasttps::npu
