#include "packed_linear.h"

#include "sizes.h"

namespace fasttps::npu {

LoweredMatvec lower_packed_linear(const PackedLinearSizes& sizes, const Machine& machine) {
  constexpr const char* kOp = "packed_linear";
  check_sizes(kOp, {{"rows", sizes.rows}, {"cols", sizes.cols}});
  check_tile_format(kOp, sizes.format, sizes.group_size);
  const std::vector<MatvecPhase> phases{{.name = "linear",
                                         .rows = sizes.rows,
                                         .cols = sizes.cols,
                                         .vector = 0,
                                         .weights = 1,
                                         .result = 2}};
  LoweredMatvec made;
  made.tiling = tile_matvec(kOp, phases, sizes.format, sizes.group_size, machine);
  made.program.name = kOp;
  made.program.arguments = {
      {"x", made.tiling.vector_bytes(sizes.cols), Access::kIn},
      {"weight", made.tiling.matrix_bytes(sizes.rows, sizes.cols), Access::kIn},
      {"y", sizes.rows * 2, Access::kOut}};
  add_matvec(made.program, phases, made.tiling);
  return made;
}

}  // namespace fasttps::npu
