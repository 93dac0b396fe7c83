#pragma once
#include <string>
#include <vector>

#include "bf16_choice.h"

// The product that the table avx512_bf16 uses for bf16 where it has both; the other tables have FMA
// alone. Chosen at first use and the same in every process of a machine: bf16_choice.h says how.
namespace fasttps::cpu {

// Throws c10::ValueError if FASTTPS_BF16_GEMM names what this CPU or the active table cannot run,
// or the file of `fasttps tune` is broken.
Bf16Product bf16_product();

// The same with who chose it.
Bf16Choice bf16_product_choice();

// What this CPU can run.
std::vector<std::string> bf16_products();

// Later calls of any thread multiply by `name`. Throws c10::ValueError listing what can run.
void use_bf16_product(const std::string& name);

}  // namespace fasttps::cpu
