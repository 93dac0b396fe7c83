#define __AIE_ARCH__ 21
#define FASTTPS_KERNELS aie2p_kernels
#include "host_kernels.inc"
