#pragma once
#include <cstdint>
#include <span>

#include "kernel_table.h"

// Which tables were built, and which of them this CPU runs. Torch-free.
namespace fasttps::cpu {

// Every table of this build, fastest first; scalar is the last and always runs.
std::span<const KernelTable* const> kernel_tables();

// CpuFeature bits that the CPU and the operating system offer.
uint32_t cpu_features();

// The AMX bits by EDX of CPUID leaf 7 and by XCR0: none unless the operating system saves tiles.
uint32_t amx_features(uint32_t leaf7_edx, uint64_t xcr0);

// Whether `table` has run on a CPU, rather than on an emulation alone. Others are not chosen unless
// they are asked for.
bool is_proven(const KernelTable& table);

// Required by `table` and not offered here: 0 if the table runs.
uint32_t missing_feature_bits(const KernelTable& table);

// One CpuFeature bit as /proc/cpuinfo spells it.
const char* feature_name(CpuFeature bit);

}  // namespace fasttps::cpu
