#pragma once
#include "cpu/kernel_table.h"

namespace fasttps::cpu {

// The kernels of the table avx512_amx with emulated tiles, and scalars for vectors.
extern const KernelTable kEmulatedAmxKernels;

// Whether this thread has tiles configured.
bool emulated_tiles_are_configured();

// Products of tiles that this thread has computed.
int64_t emulated_tile_products();

}  // namespace fasttps::cpu
