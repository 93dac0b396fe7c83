#include "kernel_list.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/host.h"

namespace fasttps::npu {
namespace {

using Values = std::span<const KernelValue>;
using Bytes = std::vector<int64_t>;

constexpr int64_t kBf16 = 2, kF32 = 4;

struct Counts {
  const char* name;
  Bytes (*memory_bytes)(Values);
  Work (*work)(Values);
};

constexpr int64_t kBlock = 64;  // rows and columns of STEEL's blocks

// Whether a block of STEEL has work, whose coordinates, tokens and offset begin at value `i`: as
// block_kind of prefill.cc.
bool is_live(Values v, size_t i) {
  const int64_t first = v[i].number * kBlock, column = v[i + 1].number * kBlock;
  return first < v[i + 2].number && column <= v[i + 3].number + first + kBlock - 1;
}

#define N(i) v[i].number
const Counts kCounts[] = {
    {"copy", [](Values v) -> Bytes { return {N(2), N(2)}; },
     [](Values v) { return Work{.moved_bytes = N(2)}; }},
    {"gemv", [](Values v) -> Bytes { return {N(3) * N(4) * kBf16, N(4) * kBf16, N(3) * kF32}; },
     [](Values v) { return Work{.bf16_macs = N(3) * N(4)}; }},
    {"gemv_int8",
     [](Values v) -> Bytes {
       return {N(3) * N(4) + N(3) * (N(4) / N(5)) * kBf16, N(4) * kBf16, N(3) * kF32};
     },
     [](Values v) {
       // Integers to bf16, and 32 lanes of each group scaled.
       return Work{.bf16_macs = N(3) * N(4),
                   .elementwise = N(3) * N(4) + N(3) * (N(4) / N(5)) * 32};
     }},
    {"gemv_int4",
     [](Values v) -> Bytes {
       const int64_t groups = N(3) * (N(4) / N(5));
       return {N(3) * N(4) / 2 + groups * kBf16 * (N(6) ? 2 : 1), N(4) * kBf16, N(3) * kF32};
     },
     [](Values v) {
       return Work{.bf16_macs = (N(6) ? 2 : 1) * N(3) * N(4),
                   .elementwise = 2 * N(3) * N(4) + N(3) * (N(4) / N(5)) * 32};
     }},
    {"f32_to_bf16", [](Values v) -> Bytes { return {N(2) * kF32, N(2) * kBf16}; },
     [](Values v) { return Work{.elementwise = N(2)}; }},
    {"silu_mul", [](Values v) -> Bytes { return {N(3) * kF32, N(3) * kF32, N(3) * kBf16}; },
     [](Values v) { return Work{.elementwise = 6 * N(3), .exponentials = N(3)}; }},
    {"gemm_tile",
     [](Values v) -> Bytes {
       return {N(3) * N(4) * kBf16, N(4) * N(5) * kBf16, N(3) * N(5) * kF32};
     },
     [](Values v) { return Work{.bf16_macs = N(3) * N(4) * N(5)}; }},
    {"scale_tile", [](Values v) -> Bytes { return {N(2) * kF32, N(2) * kBf16}; },
     [](Values v) { return Work{.elementwise = 2 * N(2)}; }},
    {"softmax_rows", [](Values v) -> Bytes { return {N(2) * N(3) * kBf16, N(2) * N(3) * kBf16}; },
     [](Values v) { return Work{.elementwise = 5 * N(2) * N(3), .exponentials = N(2) * N(3)}; }},
    {"rope",
     [](Values v) -> Bytes {
       const int64_t rows = N(4) * N(5) * kBf16;
       const int64_t table = N(6) * kF32;
       return Bytes{rows, table, table, rows};
     },
     [](Values v) { return Work{.elementwise = 4 * N(4) * N(6)}; }},
    {"decode_scores",
     [](Values v) -> Bytes {
       const int64_t rows = N(3), head_dim = N(4);
       return Bytes{rows * head_dim * kBf16, N(7) * head_dim * kBf16, rows * N(5) * kF32};
     },
     [](Values v) { return Work{.bf16_macs = N(3) * N(4) * N(7)}; }},
    {"decode_softmax", [](Values v) -> Bytes { return Bytes{N(2) * N(3) * kF32, N(2) * kF32}; },
     [](Values v) {
       const int64_t weights = N(2) * N(4);
       return Work{.elementwise = 4 * weights, .exponentials = weights};
     }},
    {"decode_values",
     [](Values v) -> Bytes {
       const int64_t rows = N(3), head_dim = N(4);
       return Bytes{rows * N(5) * kF32, N(7) * head_dim * kBf16, rows * head_dim * kF32};
     },
     [](Values v) { return Work{.bf16_macs = N(3) * N(4) * N(7)}; }},
    {"decode_finish", [](Values v) -> Bytes { return Bytes{N(3) * kF32, kF32, N(3) * kBf16}; },
     [](Values v) { return Work{.elementwise = N(3)}; }},
    {"steel_scores",
     [](Values v) -> Bytes {
       const int64_t block = kBlock * N(4) * kBf16;
       return Bytes{block, block, (kBlock + 2) * kBlock * kF32, kBlock * kF32};
     },
     [](Values v) {
       const bool live = is_live(v, 5);
       return Work{.bf16_macs = live ? kBlock * kBlock * N(4) : 0,
                   .elementwise = live ? 2 * kBlock * kBlock : 0};
     }},
    {"steel_softmax",
     [](Values) -> Bytes {
       return Bytes{(kBlock + 2) * kBlock * kF32, kBlock * kBlock * kBf16, 2 * kBlock * kF32,
                    kBlock * kF32};
     },
     [](Values v) {
       const int64_t weights = is_live(v, 4) ? kBlock * kBlock : 0;
       return Work{.elementwise = 4 * weights, .exponentials = weights};
     }},
    {"steel_values",
     [](Values v) -> Bytes {
       const int64_t head_dim = N(5);
       return Bytes{kBlock * kBlock * kBf16, kBlock * head_dim * kBf16, 2 * kBlock * kF32,
                    kBlock * head_dim * kF32, kBlock * kF32};
     },
     [](Values v) {
       const bool live = is_live(v, 6);
       return Work{.bf16_macs = live ? kBlock * kBlock * N(5) : 0,
                   .elementwise = live ? kBlock * N(5) : 0};
     }},
    {"steel_finish",
     [](Values v) -> Bytes {
       const int64_t elements = kBlock * N(3);
       return Bytes{elements * kF32, kBlock * kF32, elements * kBf16};
     },
     [](Values v) { return Work{.elementwise = kBlock * N(3)}; }},
};
#undef N

std::vector<Kernel> make_kernels() {
  const auto aie2 = aie2_kernels(), aie2p = aie2p_kernels(), bfp16 = aie2p_bfp16_kernels();
  std::vector<Kernel> out;
  for (size_t i = 0; i < aie2.size(); ++i) {
    const auto* counts = std::find_if(std::begin(kCounts), std::end(kCounts), [&](const Counts& c) {
      return c.name == std::string(aie2[i].name);
    });
    if (counts == std::end(kCounts))
      throw std::logic_error(std::string("kernel_list: no counts for ") + aie2[i].name);
    out.push_back({aie2[i].name, aie2[i].arguments, counts->memory_bytes, counts->work, aie2[i].run,
                   aie2p[i].run, bfp16[i].run});
  }
  return out;
}
const std::vector<Kernel>& all_kernels() {
  static const std::vector<Kernel> kernels = make_kernels();
  return kernels;
}

int64_t over(int64_t amount, int64_t rate) { return (amount + rate - 1) / rate; }

}  // namespace

void Kernel::run(Numerics numerics, std::span<const KernelValue> values) const {
  if (values.size() != arguments.size())
    throw std::invalid_argument(name + ": wanted " + std::to_string(arguments.size()) +
                                " arguments, got " + std::to_string(values.size()));
  if (numerics.generation == Generation::kAie2) {
    if (numerics.bfp16_products)
      throw std::invalid_argument(name + ": bfp16 products need AIE2P, got AIE2");
    return run_aie2(values);
  }
  return numerics.bfp16_products ? run_aie2p_bfp16(values) : run_aie2p(values);
}

const Kernel& kernel(const std::string& name) {
  std::string names;
  for (const Kernel& k : all_kernels()) {
    if (k.name == name) return k;
    names += (names.empty() ? "" : ", ") + k.name;
  }
  throw std::invalid_argument("kernel: wanted one of " + names + "; got '" + name + "'");
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernel& k : all_kernels()) names.push_back(k.name);
  return names;
}

int64_t kernel_cycles(const Machine& machine, const Kernel& kernel,
                      std::span<const KernelValue> arguments) {
  const Work work = kernel.work(arguments);
  const CoreSpec& core = machine.core;
  const bool idle =
      work.bf16_macs + work.int8_macs + work.elementwise + work.exponentials + work.moved_bytes ==
      0;
  const auto measured = machine.kernel_cycles.find(kernel.name);
  if (measured != machine.kernel_cycles.end() && !idle) return measured->second;
  // bf16 and int8 products share the multiplier; a vector register of bf16 lanes moves in a cycle.
  return core.call_cycles + std::max({over(work.bf16_macs, core.bf16_macs_per_cycle) +
                                          over(work.int8_macs, core.int8_macs_per_cycle),
                                      over(work.elementwise, core.vector_lanes),
                                      over(work.exponentials, core.exp_lanes),
                                      over(work.moved_bytes, core.vector_lanes * kBf16)});
}

}  // namespace fasttps::npu
