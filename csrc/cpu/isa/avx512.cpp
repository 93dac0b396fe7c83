#include "avx512_vec.h"

namespace {
using Vec = Avx512Vec<false>;
}

#include "../kernels/all.h"

namespace fasttps::cpu {
const KernelTable kAvx512Kernels =
    kernel_table_for<Vec>("avx512", kAvx2Bit | kFmaBit | kF16cBit | kAvx512fBit | kAvx512bwBit |
                                        kAvx512dqBit | kAvx512vlBit);
}  // namespace fasttps::cpu
