#define __AIE_ARCH__ 21
#define AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16
#define FASTTPS_KERNELS aie2p_bfp16_kernels
#include "host_kernels.inc"
