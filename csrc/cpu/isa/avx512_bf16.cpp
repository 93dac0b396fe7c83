#include "avx512_bf16_vec.h"
//
#include "../kernels/all.h"

namespace fasttps::cpu {
const KernelTable kAvx512Bf16Kernels = kernel_table_for<Vec>(
    "avx512_bf16", kAvx2Bit | kFmaBit | kF16cBit | kAvx512fBit | kAvx512bwBit | kAvx512dqBit |
                       kAvx512vlBit | kAvx512Bf16Bit | kAvx512VnniBit);
}  // namespace fasttps::cpu
