#include "dispatch.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <atomic>
#include <cstdlib>

#include "bf16_product.h"
#include "isa_list.h"

namespace fasttps::cpu {
namespace {

std::atomic<const KernelTable*> active{nullptr};

// `source`: where the name came from, for the error.
const KernelTable* find_runnable(const char* source, const std::string& isa) {
  for (const KernelTable* table : kernel_tables()) {
    if (isa != table->isa || missing_feature_bits(*table) != 0) continue;
    const char* product = std::getenv("FASTTPS_BF16_GEMM");
    TORCH_CHECK_VALUE(product == nullptr || std::string(product) != name_of(Bf16Product::kDpbf16) ||
                          (table->required_features & kAvx512Bf16Bit) != 0,
                      "FASTTPS_BF16_GEMM: isa ", isa, " runs ", name_of(Bf16Product::kFma),
                      "; got '", product, "'");
    return table;
  }
  TORCH_CHECK_VALUE(false, source, ": this CPU runs ", c10::Join(", ", isas()), "; got '", isa,
                    "'");
}

// The fastest that runs here and has run on some CPU before.
const char* default_isa() {
  for (const KernelTable* table : kernel_tables()) {
    if (missing_feature_bits(*table) == 0 && is_proven(*table)) return table->isa;
  }
  return kernel_tables().back()->isa;
}

const KernelTable& active_table() {
  const KernelTable* table = active.load(std::memory_order_acquire);
  if (table == nullptr) {
    const char* forced = std::getenv("FASTTPS_ISA");
    const bool is_forced = forced != nullptr && *forced != '\0';
    table = find_runnable("FASTTPS_ISA", is_forced ? forced : default_isa());
    active.store(table, std::memory_order_release);
  }
  return *table;
}

}  // namespace

std::vector<std::string> known_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : kernel_tables()) names.emplace_back(table->isa);
  return names;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : kernel_tables()) {
    if (missing_feature_bits(*table) == 0) names.emplace_back(table->isa);
  }
  return names;
}

std::vector<std::string> missing_features(const std::string& isa) {
  for (const KernelTable* table : kernel_tables()) {
    if (isa != table->isa) continue;
    std::vector<std::string> names;
    for (uint32_t bits = missing_feature_bits(*table); bits != 0; bits &= bits - 1) {
      names.emplace_back(feature_name(static_cast<CpuFeature>(bits & -bits)));
    }
    return names;
  }
  TORCH_CHECK_VALUE(false, "isa: this build knows ", c10::Join(", ", known_isas()), "; got '", isa,
                    "'");
}

void use_isa(const std::string& isa) { active = find_runnable("isa", isa); }

const KernelTable& kernels() {
  bf16_product();  // a wrong FASTTPS_BF16_GEMM fails the first op, whatever its dtype
  return active_table();
}

const PackedLinearRow& linear_kernels(int64_t format) {
  const KernelTable& table = kernels();
  const bool by_fma = format == kBf16 && bf16_product() == Bf16Product::kFma;
  return by_fma ? table.packed_linear_bf16_fma : table.packed_linear[format];
}

std::string active_isa() { return active_table().isa; }

}  // namespace fasttps::cpu
