#include "kernel_list.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "kernels/host.h"

namespace fasttps::npu {
namespace {

using Values = std::span<const KernelValue>;
constexpr auto kMemory = ArgumentKind::kMemory, kNumber = ArgumentKind::kNumber;
constexpr int64_t kBf16Bytes = 2, kF32Bytes = 4;

template <class T>
auto argument_of(Values values, size_t i) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(values[i].memory);
  } else {
    return values[i].number;
  }
}

// A kernel's function, called with values one by one.
template <auto kFunction>
struct Caller;
template <class... Arguments, void (*kFunction)(Arguments...)>
struct Caller<kFunction> {
  static void run(Numerics, Values values) { run(values, std::index_sequence_for<Arguments...>()); }

 private:
  template <size_t... kI>
  static void run(Values values, std::index_sequence<kI...>) {
    kFunction(argument_of<Arguments>(values, kI)...);
  }
};

int64_t number(Values values, size_t i) { return values[i].number; }

constexpr int64_t kBlock = 64;  // rows and columns of STEEL's blocks

// Whether a block of STEEL has work, whose coordinates, tokens and offset begin at value `i`.
bool is_live(Values v, size_t i) {
  return host::block_kind(number(v, i), number(v, i + 1), number(v, i + 2), number(v, i + 3)) != 0;
}

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> list{
      {.name = "copy",  // from, to, bytes
       .arguments = {kMemory, kMemory, kNumber},
       .memory_bytes = [](Values v) { return std::vector<int64_t>{number(v, 2), number(v, 2)}; },
       .work = [](Values v) { return Work{.moved_bytes = number(v, 2)}; },
       .run = Caller<host::copy>::run},
      {.name = "gemv",  // w, x, y, rows, cols, accumulate
       .arguments = {kMemory, kMemory, kMemory, kNumber, kNumber, kNumber},
       .memory_bytes =
           [](Values v) {
             const int64_t rows = number(v, 3), cols = number(v, 4);
             return std::vector<int64_t>{rows * cols * kBf16Bytes, cols * kBf16Bytes,
                                         rows * kF32Bytes};
           },
       .work = [](Values v) { return Work{.bf16_macs = number(v, 3) * number(v, 4)}; },
       .run = Caller<host::gemv>::run},
      {.name = "gemv_int4",  // w, x, y, rows, cols, group_size, accumulate
       .arguments = {kMemory, kMemory, kMemory, kNumber, kNumber, kNumber, kNumber},
       .memory_bytes =
           [](Values v) {
             const int64_t rows = number(v, 3), cols = number(v, 4), group = number(v, 5);
             return std::vector<int64_t>{rows * cols / 2 + rows * cols / group * kBf16Bytes,
                                         cols * kBf16Bytes, rows * kF32Bytes};
           },
       // Each quant is taken apart, made 8 bits about 0, and a bf16.
       .work =
           [](Values v) {
             const int64_t quants = number(v, 3) * number(v, 4);
             return Work{.bf16_macs = quants, .elementwise = 2 * quants};
           },
       .run = Caller<host::gemv_int4>::run},
      {.name = "f32_to_bf16",  // from, to, n
       .arguments = {kMemory, kMemory, kNumber},
       .memory_bytes =
           [](Values v) {
             return std::vector<int64_t>{number(v, 2) * kF32Bytes, number(v, 2) * kBf16Bytes};
           },
       .work = [](Values v) { return Work{.elementwise = number(v, 2)}; },
       .run = Caller<host::f32_to_bf16>::run},
      {.name = "silu_mul",  // gate, up, out, n
       .arguments = {kMemory, kMemory, kMemory, kNumber},
       .memory_bytes =
           [](Values v) {
             const int64_t n = number(v, 3);
             return std::vector<int64_t>{n * kF32Bytes, n * kF32Bytes, n * kBf16Bytes};
           },
       .work =
           [](Values v) {
             return Work{.elementwise = 6 * number(v, 3), .exponentials = number(v, 3)};
           },
       .run = Caller<host::silu_mul>::run},
      {.name = "rope",  // x, cos, sin, y, rows, head_dim, rotary_dim, interleaved
       .arguments = {kMemory, kMemory, kMemory, kMemory, kNumber, kNumber, kNumber, kNumber},
       .memory_bytes =
           [](Values v) {
             const int64_t rows = number(v, 4) * number(v, 5) * kBf16Bytes;
             const int64_t table = number(v, 6) * kF32Bytes;
             return std::vector<int64_t>{rows, table, table, rows};
           },
       .work = [](Values v) { return Work{.elementwise = 4 * number(v, 4) * number(v, 6)}; },
       .run = Caller<host::rope>::run},
      // q, k, s, rows, head_dim, slots, first, count, scale
      {.name = "decode_scores",
       .arguments = {kMemory, kMemory, kMemory, kNumber, kNumber, kNumber, kNumber, kNumber,
                     kNumber},
       .memory_bytes =
           [](Values v) {
             const int64_t rows = number(v, 3), head_dim = number(v, 4);
             return std::vector<int64_t>{rows * head_dim * kBf16Bytes,
                                         number(v, 7) * head_dim * kBf16Bytes,
                                         rows * number(v, 5) * kF32Bytes};
           },
       .work =
           [](Values v) { return Work{.bf16_macs = number(v, 3) * number(v, 4) * number(v, 7)}; },
       .run = Caller<host::decode_scores>::run},
      {.name = "decode_softmax",  // s, sums, rows, slots, count
       .arguments = {kMemory, kMemory, kNumber, kNumber, kNumber},
       .memory_bytes =
           [](Values v) {
             return std::vector<int64_t>{number(v, 2) * number(v, 3) * kF32Bytes,
                                         number(v, 2) * kF32Bytes};
           },
       .work =
           [](Values v) {
             const int64_t weights = number(v, 2) * number(v, 4);
             return Work{.elementwise = 4 * weights, .exponentials = weights};
           },
       .run = Caller<host::decode_softmax>::run},
      // p, v, o, rows, head_dim, slots, first, count
      {.name = "decode_values",
       .arguments = {kMemory, kMemory, kMemory, kNumber, kNumber, kNumber, kNumber, kNumber},
       .memory_bytes =
           [](Values v) {
             const int64_t rows = number(v, 3), head_dim = number(v, 4);
             return std::vector<int64_t>{rows * number(v, 5) * kF32Bytes,
                                         number(v, 7) * head_dim * kBf16Bytes,
                                         rows * head_dim * kF32Bytes};
           },
       .work =
           [](Values v) { return Work{.bf16_macs = number(v, 3) * number(v, 4) * number(v, 7)}; },
       .run = Caller<host::decode_values>::run},
      {.name = "decode_finish",  // o, sum, y, head_dim
       .arguments = {kMemory, kMemory, kMemory, kNumber},
       .memory_bytes =
           [](Values v) {
             return std::vector<int64_t>{number(v, 3) * kF32Bytes, kF32Bytes,
                                         number(v, 3) * kBf16Bytes};
           },
       .work = [](Values v) { return Work{.elementwise = number(v, 3)}; },
       .run = Caller<host::decode_finish>::run},
      // q, k, a, most, head_dim, row_block, column_block, tokens, offset, scale
      {.name = "steel_scores",
       .arguments = {kMemory, kMemory, kMemory, kMemory, kNumber, kNumber, kNumber, kNumber,
                     kNumber, kNumber},
       .memory_bytes =
           [](Values v) {
             const int64_t block = kBlock * number(v, 4) * kBf16Bytes;
             return std::vector<int64_t>{block, block, (kBlock + 2) * kBlock * kF32Bytes,
                                         kBlock * kF32Bytes};
           },
       .work =
           [](Values v) {
             const bool live = is_live(v, 5);
             return Work{.bf16_macs = live ? kBlock * kBlock * number(v, 4) : 0,
                         .elementwise = live ? 2 * kBlock * kBlock : 0};
           },
       .run = Caller<host::steel_scores>::run},
      // a, p, state, sums, row_block, column_block, tokens, offset
      {.name = "steel_softmax",
       .arguments = {kMemory, kMemory, kMemory, kMemory, kNumber, kNumber, kNumber, kNumber},
       .memory_bytes =
           [](Values) {
             return std::vector<int64_t>{(kBlock + 2) * kBlock * kF32Bytes,
                                         kBlock * kBlock * kBf16Bytes, 2 * kBlock * kF32Bytes,
                                         kBlock * kF32Bytes};
           },
       .work =
           [](Values v) {
             const int64_t weights = is_live(v, 4) ? kBlock * kBlock : 0;
             return Work{.elementwise = 4 * weights, .exponentials = weights};
           },
       .run = Caller<host::steel_softmax>::run},
      // p, v, state, o, sums, head_dim, row_block, column_block, tokens, offset
      {.name = "steel_values",
       .arguments = {kMemory, kMemory, kMemory, kMemory, kMemory, kNumber, kNumber, kNumber,
                     kNumber, kNumber},
       .memory_bytes =
           [](Values v) {
             const int64_t head_dim = number(v, 5);
             return std::vector<int64_t>{kBlock * kBlock * kBf16Bytes,
                                         kBlock * head_dim * kBf16Bytes, 2 * kBlock * kF32Bytes,
                                         kBlock * head_dim * kF32Bytes, kBlock * kF32Bytes};
           },
       .work =
           [](Values v) {
             const bool live = is_live(v, 6);
             return Work{.bf16_macs = live ? kBlock * kBlock * number(v, 5) : 0,
                         .elementwise = live ? kBlock * number(v, 5) : 0};
           },
       .run = Caller<host::steel_values>::run},
      // o, sums, y, head_dim, row_block, tokens
      {.name = "steel_finish",
       .arguments = {kMemory, kMemory, kMemory, kNumber, kNumber, kNumber},
       .memory_bytes =
           [](Values v) {
             const int64_t elements = kBlock * number(v, 3);
             return std::vector<int64_t>{elements * kF32Bytes, kBlock * kF32Bytes,
                                         elements * kBf16Bytes};
           },
       .work = [](Values v) { return Work{.elementwise = kBlock * number(v, 3)}; },
       .run = Caller<host::steel_finish>::run}};
  return list;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

const Kernel& kernel(const std::string& name) {
  for (const Kernel& one : kernels()) {
    if (one.name == name) return one;
  }
  std::string names;
  for (const std::string& one : kernel_names()) names += (names.empty() ? "" : ", ") + one;
  throw std::invalid_argument("kernel wanted " + names + ", got '" + name + "'");
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernel& one : kernels()) names.push_back(one.name);
  return names;
}

int64_t kernel_cycles(const Machine& machine, const Kernel& kernel, Values arguments) {
  const CoreSpec& core = machine.core;
  const Work work = kernel.work(arguments);
  const bool idle =
      work.bf16_macs + work.int8_macs + work.elementwise + work.exponentials + work.moved_bytes ==
      0;
  const auto measured = machine.kernel_cycles.find(kernel.name);
  if (measured != machine.kernel_cycles.end() && !idle) return measured->second;
  constexpr int64_t kMoveBytes = 32;  // of a 256-bit load or store a cycle
  return core.call_cycles + std::max({ceil_div(work.bf16_macs, core.bf16_macs_per_cycle),
                                      ceil_div(work.int8_macs, core.int8_macs_per_cycle),
                                      ceil_div(work.elementwise, core.vector_lanes),
                                      ceil_div(work.exponentials, core.exp_lanes),
                                      ceil_div(work.moved_bytes, kMoveBytes)});
}

}  // namespace fasttps::npu
