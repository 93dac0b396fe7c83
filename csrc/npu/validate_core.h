#pragma once
#include "program.h"

namespace fasttps::npu {

// A core's body against its program: FIFOs that begin or end at its tile, never more elements held
// than there are, all released where it ends or a loop begins anew; kernels that there are, with
// their arguments and room for what they read and write; loops' indices and scalars that there are.
// Throws std::invalid_argument.
void validate_core(const Program& program, const Core& core);

}  // namespace fasttps::npu
