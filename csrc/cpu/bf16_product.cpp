#include "bf16_product.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "isa_list.h"

namespace fasttps::cpu {
namespace {

constexpr int kNotChosen = -1;
std::atomic<int> chosen{kNotChosen};
std::mutex mutex;
std::optional<Bf16Choice> choice;

bool has_dpbf16() { return (cpu_features() & kAvx512Bf16Bit) != 0; }

// Requires the mutex.
const Bf16Choice& choose() {
  if (!choice) {
    try {
      choice = choose_bf16_product(cpu_model(), has_dpbf16(), std::getenv("FASTTPS_BF16_GEMM"),
                                   tuned_path());
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
  }
  chosen.store(static_cast<int>(choice->product), std::memory_order_release);
  return *choice;
}

}  // namespace

Bf16Product bf16_product() {
  const int product = chosen.load(std::memory_order_acquire);
  if (product != kNotChosen) return static_cast<Bf16Product>(product);
  const std::lock_guard<std::mutex> lock(mutex);
  return choose().product;
}

Bf16Choice bf16_product_choice() {
  const std::lock_guard<std::mutex> lock(mutex);
  return choose();
}

std::vector<std::string> bf16_products() {
  std::vector<std::string> names;
  if (has_dpbf16()) names.emplace_back(name_of(Bf16Product::kDpbf16));
  names.emplace_back(name_of(Bf16Product::kFma));
  return names;
}

void use_bf16_product(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (Bf16Product product : {Bf16Product::kDpbf16, Bf16Product::kFma}) {
    if (name != name_of(product) || (product == Bf16Product::kDpbf16 && !has_dpbf16())) continue;
    choice = Bf16Choice{product, "this process", true};
    chosen.store(static_cast<int>(product), std::memory_order_release);
    return;
  }
  TORCH_CHECK_VALUE(false, "bf16_product: this CPU runs ", c10::Join(", ", bf16_products()),
                    "; got '", name, "'");
}

}  // namespace fasttps::cpu
