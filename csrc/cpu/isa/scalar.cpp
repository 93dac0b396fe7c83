#include "scalar_vec.h"
//
#include "../kernels/all.h"

namespace fasttps::cpu {
const KernelTable kScalarKernels = kernel_table_for<Vec>("scalar", 0);
}  // namespace fasttps::cpu
