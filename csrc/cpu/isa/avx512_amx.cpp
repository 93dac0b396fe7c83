#include "avx512_bf16_vec.h"
//
#include "../kernels/all.h"
#include "../kernels/tiled_linear.h"
#include "../kernels/tiled_prefill.h"
#include "amx_tiles.h"

namespace fasttps::cpu {
const KernelTable kAvx512AmxKernels =
    with_tiled_prefill<Vec, AmxTiles>(with_tiles<Vec, AmxTiles>(kernel_table_for<Vec>(
        "avx512_amx", kAvx2Bit | kFmaBit | kF16cBit | kAvx512fBit | kAvx512bwBit | kAvx512dqBit |
                          kAvx512vlBit | kAvx512Bf16Bit | kAvx512VnniBit | kAmxTileBit |
                          kAmxBf16Bit | kAmxInt8Bit)));
}  // namespace fasttps::cpu
