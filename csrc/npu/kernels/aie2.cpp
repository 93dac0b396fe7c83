#define __AIE_ARCH__ 20
#define FASTTPS_KERNELS aie2_kernels
#include "host_kernels.inc"
