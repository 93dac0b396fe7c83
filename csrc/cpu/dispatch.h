#pragma once
#include <string>
#include <vector>

#include "kernel_table.h"

// The one table that ops call through. Chosen at first use: the fastest that runs here, or what
// the environment variable FASTTPS_ISA names.
namespace fasttps::cpu {

// Throws c10::ValueError if FASTTPS_ISA or FASTTPS_BF16_GEMM names what cannot run here.
const KernelTable& kernels();

// The products of a packed format in the active table; of bf16, those that bf16_product() chooses.
const PackedLinearRow& linear_kernels(int64_t format);

std::vector<std::string> known_isas();  // of this build, fastest first
std::vector<std::string> isas();        // those that run here, fastest first
std::string active_isa();

// CPU features that `isa` needs and this CPU lacks; throws c10::ValueError for an unknown name.
std::vector<std::string> missing_features(const std::string& isa);

// Later calls of any thread go through `isa`. Throws c10::ValueError listing those that can run.
void use_isa(const std::string& isa);

}  // namespace fasttps::cpu
