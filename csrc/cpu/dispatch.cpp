#include "dispatch.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <atomic>
#include <cstdlib>

#include "isa_list.h"

namespace fasttps::cpu {
namespace {

std::atomic<const KernelTable*> active{nullptr};

// `source`: where the name came from, for the error.
const KernelTable* find_runnable(const char* source, const std::string& isa) {
  for (const KernelTable* table : kernel_tables()) {
    if (isa == table->isa && missing_feature_bits(*table) == 0) return table;
  }
  TORCH_CHECK_VALUE(false, source, ": this CPU runs ", c10::Join(", ", isas()), "; got '", isa,
                    "'");
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
  const KernelTable* table = active.load(std::memory_order_acquire);
  if (table == nullptr) {
    const char* forced = std::getenv("FASTTPS_ISA");
    const bool is_forced = forced != nullptr && *forced != '\0';
    table = find_runnable("FASTTPS_ISA", is_forced ? forced : isas().front());
    active.store(table, std::memory_order_release);
  }
  return *table;
}

std::string active_isa() { return kernels().isa; }

}  // namespace fasttps::cpu
