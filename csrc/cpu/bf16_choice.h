#pragma once
#include <string>

// How a CPU multiplies bf16 fastest, both ways being exact: vdpbf16ps, or f32 FMA on widened
// values. CPUs with the first differ: on some it has twice the rate of the second, on others half
// of it. Torch-free; what is wrong throws std::invalid_argument.
namespace fasttps::cpu {

enum class Bf16Product : int { kDpbf16 = 0, kFma = 1 };

const char* name_of(Bf16Product product);  // as FASTTPS_BF16_GEMM takes it

struct CpuModel {
  std::string vendor;  // of CPUID leaf 0, such as "AuthenticAMD"; empty where there is no CPUID
  int family;
  int model;
};
CpuModel cpu_model();

struct Bf16Choice {
  Bf16Product product;
  std::string origin;  // in words: who chose it
  bool known;          // false: a guess, which `fasttps tune` would replace
};

// In this order: `forced`, the value of FASTTPS_BF16_GEMM (null or empty: none); what `fasttps
// tune` stored for this CPU in the file `tuned`, if there is one; the table of measured CPUs; a
// guess. A CPU without vdpbf16ps has FMA alone.
Bf16Choice choose_bf16_product(const CpuModel& cpu, bool has_dpbf16, const char* forced,
                               const std::string& tuned);

// Where `fasttps tune` stores, in $XDG_CONFIG_HOME or ~/.config; empty if neither is known.
// A line a CPU: vendor, family, model, product; # begins a comment.
std::string tuned_path();

}  // namespace fasttps::cpu
