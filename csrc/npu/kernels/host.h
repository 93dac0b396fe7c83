#pragma once
#include <cstdint>
#include <span>
#include <utility>

#include "npu/kernel_list.h"

// The tile kernels as the host calls them. One table for each way that cores compute.
namespace fasttps::npu {

struct HostKernel {
  const char* name;
  std::vector<ArgumentKind> arguments;
  void (*run)(std::span<const KernelValue> arguments);
};
std::vector<HostKernel> aie2_kernels();
std::vector<HostKernel> aie2p_kernels();
std::vector<HostKernel> aie2p_bfp16_kernels();

// A kernel's pointers are memory, its integers numbers.
template <class T>
T unwrap(const KernelValue& value) {
  if constexpr (std::is_pointer_v<T>)
    return static_cast<T>(value.memory);
  else
    return static_cast<T>(value.number);
}
template <auto kFunction, class... T>
HostKernel host_kernel(const char* name, void (*)(T...)) {
  return {name,
          {(std::is_pointer_v<T> ? ArgumentKind::kMemory : ArgumentKind::kNumber)...},
          [](std::span<const KernelValue> values) {
            [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
              kFunction(unwrap<T>(values[kIndex])...);
            }(std::index_sequence_for<T...>{});
          }};
}

}  // namespace fasttps::npu
