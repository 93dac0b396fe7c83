#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "machine.h"

// The tile kernels of kernels/, by the names that programs call them by.
namespace fasttps::npu {

// A kernel's argument when it runs on the host: memory of the tile, or a number.
union KernelValue {
  void* memory;
  int64_t number;
};

// What one call makes a core do: counted from the numbers that it is given, never from data.
struct Work {
  int64_t bf16_macs = 0;
  int64_t int8_macs = 0;
  int64_t elementwise = 0;   // bf16 or f32 lanes of add, multiply, max, compare, convert
  int64_t exponentials = 0;  // lanes
  int64_t moved_bytes = 0;   // copied in L1
};

// How a generation of cores computes, where results differ by it.
enum class Generation { kAie2, kAie2p };
struct Numerics {
  Generation generation = Generation::kAie2p;
  bool bfp16_products = false;  // bf16 products through bfp16ebs8 blocks (AIE2P only)
};

enum class ArgumentKind { kMemory, kNumber };

struct Kernel {
  std::string name;
  std::vector<ArgumentKind> arguments;
  // Bytes that the call reads or writes through each memory argument, given the numbers.
  std::vector<int64_t> (*memory_bytes)(std::span<const KernelValue> arguments);
  Work (*work)(std::span<const KernelValue> arguments);
  void (*run_aie2)(std::span<const KernelValue> arguments);
  void (*run_aie2p)(std::span<const KernelValue> arguments);
  void (*run_aie2p_bfp16)(std::span<const KernelValue> arguments);

  // Throws std::invalid_argument for other arguments, or numerics that no core has.
  void run(Numerics numerics, std::span<const KernelValue> values) const;
};

// Throws std::invalid_argument with the names that there are.
const Kernel& kernel(const std::string& name);
std::vector<std::string> kernel_names();

// Cycles of a call on a core: as measured (Machine::kernel_cycles), else call_cycles and the
// largest of what its units need, since a VLIW core issues to all of them at once.
int64_t kernel_cycles(const Machine& machine, const Kernel& kernel,
                      std::span<const KernelValue> arguments);

}  // namespace fasttps::npu
