#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "matvec.h"

namespace fasttps::npu {

// A matrix in rows, as a phase of a design wants it. Pure moves.
//   values  [rows, cols] bf16; or of int4 quants [rows, cols / 2] (of 32 columns the first 16 in
//   the low halves) scales  of int4 [rows, cols / group_size] bf16; else empty
// Where the phase is gated, rows are gate's first and then up's.
struct MatvecWeight {
  std::span<const std::byte> values;
  std::span<const std::byte> scales;
};

// Fills `packed`, of MatvecTiling::matrix_bytes.
// Throws std::invalid_argument where a size is another.
void pack_matvec(const MatvecPhase& phase, const MatvecTiling& tiling, const MatvecWeight& weight,
                 std::span<std::byte> packed);

}  // namespace fasttps::npu
