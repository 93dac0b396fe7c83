#include "bf16_choice.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#ifdef FASTTPS_X86
#include <cpuid.h>
#endif

namespace fasttps::cpu {
namespace {

struct MeasuredCpu {
  const char* vendor;
  int family;
  int first_model;
  int last_model;
  Bf16Product product;
  const char* name;
};

// As benchmarks/limits.py measured it: 1e9 operations a second of a core, vdpbf16ps and f32 FMA.
constexpr MeasuredCpu kMeasured[] = {
    // Only the Zen 4 cores of this family have vdpbf16ps. 225 and 85.
    {"AuthenticAMD", 25, 0, 255, Bf16Product::kDpbf16, "Zen 4"},
    {"AuthenticAMD", 26, 0, 15, Bf16Product::kDpbf16, "Zen 5 (EPYC 9005)"},  // 554 and 280
    {"GenuineIntel", 6, 143, 143, Bf16Product::kFma, "Sapphire Rapids"},
    {"GenuineIntel", 6, 207, 207, Bf16Product::kFma, "Emerald Rapids"},  // 86 and 177
};

std::optional<Bf16Product> product_named(const std::string& name) {
  for (Bf16Product product : {Bf16Product::kDpbf16, Bf16Product::kFma}) {
    if (name == name_of(product)) return product;
  }
  return std::nullopt;
}

std::optional<Bf16Product> read_tuned(const CpuModel& cpu, const std::string& path) {
  std::ifstream file(path);
  std::optional<Bf16Product> found;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    std::istringstream words(line.substr(0, line.find('#')));
    CpuModel of;
    std::string name, rest;
    if (!(words >> of.vendor)) continue;
    words >> of.family >> of.model >> name;
    const std::optional<Bf16Product> product = product_named(name);
    if (!words || !product || words >> rest) {
      std::ostringstream message;
      message << path << ", line " << number
              << ": wanted a CPU's vendor, family and model and dpbf16 or fma, got '" << line
              << "'; `fasttps tune --force` writes it anew";
      throw std::invalid_argument(message.str());
    }
    if (of.vendor == cpu.vendor && of.family == cpu.family && of.model == cpu.model) {
      found = product;
    }
  }
  return found;
}

}  // namespace

const char* name_of(Bf16Product product) {
  return product == Bf16Product::kDpbf16 ? "dpbf16" : "fma";
}

CpuModel cpu_model() {
  CpuModel cpu{"", 0, 0};
#ifdef FASTTPS_X86
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return cpu;
  char vendor[13] = {};
  for (const auto& [at, word] : {std::pair{0, ebx}, {4, edx}, {8, ecx}}) {
    std::memcpy(vendor + at, &word, sizeof(word));
  }
  cpu.vendor = vendor;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return cpu;
  cpu.family = static_cast<int>(eax >> 8 & 15);
  cpu.model = static_cast<int>(eax >> 4 & 15);
  if (cpu.family == 6 || cpu.family == 15) cpu.model += static_cast<int>(eax >> 16 & 15) << 4;
  if (cpu.family == 15) cpu.family += static_cast<int>(eax >> 20 & 255);
#endif
  return cpu;
}

Bf16Choice choose_bf16_product(const CpuModel& cpu, bool has_dpbf16, const char* forced,
                               const std::string& tuned) {
  if (forced != nullptr && *forced != '\0') {
    const std::optional<Bf16Product> product = product_named(forced);
    if (!product || (*product == Bf16Product::kDpbf16 && !has_dpbf16)) {
      throw std::invalid_argument(std::string("FASTTPS_BF16_GEMM: this CPU runs ") +
                                  (has_dpbf16 ? "dpbf16, fma" : "fma") + "; got '" + forced + "'");
    }
    return {*product, "FASTTPS_BF16_GEMM", true};
  }
  if (!has_dpbf16) return {Bf16Product::kFma, "this CPU lacks avx512_bf16", true};
  if (const auto product = read_tuned(cpu, tuned)) return {*product, tuned, true};
  for (const MeasuredCpu& row : kMeasured) {
    if (cpu.vendor == row.vendor && cpu.family == row.family && cpu.model >= row.first_model &&
        cpu.model <= row.last_model) {
      return {row.product, std::string("measured on ") + row.name, true};
    }
  }
  // Every Intel core measured so far has the slower vdpbf16ps, every other one the faster.
  const bool is_intel = cpu.vendor == "GenuineIntel";
  return {is_intel ? Bf16Product::kFma : Bf16Product::kDpbf16,
          "a guess for an unknown CPU; `fasttps tune` measures it", false};
}

std::string tuned_path() {
  const char* config = std::getenv("XDG_CONFIG_HOME");
  if (config != nullptr && *config == '/') return std::string(config) + "/fasttps/bf16_product";
  const char* home = std::getenv("HOME");
  if (home != nullptr && *home == '/') return std::string(home) + "/.config/fasttps/bf16_product";
  return "";
}

}  // namespace fasttps::cpu
