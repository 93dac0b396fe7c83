// Calls a kernel of one instruction set a given number of times, so that its instructions are the
// difference between the counts of two runs. Torch-free.
//   fasttps_instructions                          the instruction sets that run, one a line
//   fasttps_instructions ISA                      the cases, one a line: name, tab, work
//   fasttps_instructions ISA CASE REPEATS
// work: multiplications of the case, or elements where it has none.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/isa_list.h"

namespace fasttps::cpu {
namespace {

struct Case {
  std::string name;
  int64_t work;
  std::function<void()> run;
};

constexpr const char* kTypeNames[] = {"float32", "bfloat16", "float16", "int8"};

// Small values; as bits of any type they are finite.
std::vector<float> values(int64_t count) {
  std::vector<float> made(static_cast<size_t>(count));
  for (size_t i = 0; i < made.size(); ++i) made[i] = static_cast<float>(i % 13) * 0.125f - 0.75f;
  return made;
}

// Zeros: what a kernel does depends on shapes alone. 64-byte aligned.
class Zeros {
 public:
  explicit Zeros(int64_t bytes)
      : data_(static_cast<uint8_t*>(std::aligned_alloc(64, room(bytes)))) {
    std::memset(data_.get(), 0, room(bytes));
  }
  uint8_t* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  static size_t room(int64_t bytes) { return static_cast<size_t>((bytes + 63) / 64 * 64); }
  std::unique_ptr<uint8_t, Free> data_;
};

Case attention(const KernelTable& table, bool prefill, int type) {
  constexpr int64_t kPositions = 512, kDim = 64;
  const int64_t rows = prefill ? kMaxQueryRows : 4;
  struct State {
    std::vector<float> query, max, sum, out, scratch, scale;
    std::vector<int64_t> first, last;
    std::vector<uint8_t> attended;
    Zeros cache{kPositions * kDim * 4};
  };
  auto state = std::make_shared<State>();
  const auto count = static_cast<size_t>(rows);
  state->query = values(rows * kDim);
  state->scratch.resize(static_cast<size_t>(attention_scratch_floats(kDim)));
  state->scale.assign(kPositions, 1.0f);
  state->first.assign(count, 0);
  for (int64_t r = 0; r < rows; ++r) state->last.push_back(kPositions - rows + r);
  state->attended.assign(count, 0);
  auto* const kernel = prefill ? table.causal_prefill[type] : table.rope_attention_decode[type];
  const auto run = [state, rows, kernel, count] {
    state->max.assign(count, -std::numeric_limits<float>::infinity());
    state->sum.assign(count, 0.0f);
    state->out.assign(count * kDim, 0.0f);
    AttentionTask task{};
    task.query = state->query.data();
    task.rows = rows;
    task.head_dim = task.padded_dim = task.k_stride = task.v_stride = kDim;
    task.k = task.v = state->cache.data();
    task.k_scale = task.v_scale = state->scale.data();
    task.k_scale_stride = task.v_scale_stride = 1;
    task.end = kPositions;
    task.first = state->first.data();
    task.last = state->last.data();
    task.mask_stride = 1;
    task.max = state->max.data();
    task.sum = state->sum.data();
    task.out = state->out.data();
    task.attended = state->attended.data();
    task.scratch = state->scratch.data();
    kernel(task);
  };
  const std::string op = prefill ? "causal_prefill" : "rope_attention_decode";
  const int64_t live = rows * (kPositions - rows) + rows * (rows + 1) / 2;
  return {op + " " + kTypeNames[type] + " rows " + std::to_string(rows) + " positions 512 dim 64",
          2 * live * kDim, run};
}

Case linear(const KernelTable& table, int format, int int8_activation, bool gate_up,
            int64_t tokens) {
  constexpr int64_t kRows = 64, kCols = 512, kMostBytes = 4;  // of an element, with its scales
  const bool grouped = (format >= 4 && format <= 6) || format == 9;
  const int64_t group_size = grouped ? 32 : 0;
  struct State {
    Zeros packed{2 * kRows * kCols * kMostBytes}, activation{8 * kCols * 8};
    std::vector<float> out;
  };
  auto state = std::make_shared<State>();
  state->out.resize(static_cast<size_t>(tokens * kRows));
  const PackedLinearKernels& kernels = table.packed_linear[format][int8_activation];
  const int64_t activation_bytes = activation_row_bytes(kernels.kind, kCols);
  const std::string name = std::string(gate_up ? "gate_up_silu_mlp" : "packed_linear") +
                           " format " + std::to_string(format) +
                           (int8_activation ? " int8 activations" : "") + " tokens " +
                           std::to_string(tokens) + " rows 64 cols 512";
  const auto run = [=, &kernels] {
    if (gate_up) {
      kernels.gate_up({state->activation.data(), activation_bytes, tokens, kCols, group_size,
                       state->packed.data(), 0, kRows / kPanelRows, nullptr, nullptr, kSilu,
                       state->out.data(), kF32, kRows, kRows});
    } else {
      kernels.linear({state->activation.data(), activation_bytes, tokens, kCols, group_size,
                      state->packed.data(), 0, kRows / kPanelRows, nullptr, false,
                      state->out.data(), kF32, kRows, kRows});
    }
  };
  return {name, (gate_up ? 2 : 1) * tokens * kRows * kCols, run};
}

Case rows_of(const KernelTable& table, const std::string& name) {
  constexpr int64_t kCount = 1024;
  struct State {
    std::vector<float> x = values(4 * kCount), y = x, weights{0.5f, 0.25f, 0.125f, 0.125f};
    std::vector<int8_t> q = std::vector<int8_t>(kCount);
    float scale = 0.0f;
  };
  auto state = std::make_shared<State>();
  const auto run = [state, &table, name] {
    if (name == "exp_f32") table.exp_f32(state->x.data(), state->y.data(), kCount);
    if (name == "quantize_row") {
      table.quantize_row(state->x.data(), state->q.data(), &state->scale, kCount);
    }
    if (name == "merge_attention") {
      const float* parts[4];
      for (int64_t p = 0; p < 4; ++p) parts[p] = state->x.data() + p * kCount;
      table.merge_attention(parts, state->weights.data(), 4, state->y.data(), kCount);
    }
    if (name == "rope_row") {
      table.rope_row[kF32]({state->x.data(), state->x.data() + kCount, state->x.data() + 2 * kCount,
                            kCount, kCount, false, 1.0f, state->y.data()});
    }
  };
  return {name + " float32 count 1024", (name == "merge_attention" ? 4 : 1) * kCount, run};
}

Case pack(const KernelTable& table) {
  constexpr int64_t kCols = 512;
  auto weight = std::make_shared<Zeros>(kPanelRows * kCols * 2);
  auto packed = std::make_shared<Zeros>(kPanelRows * kCols * 2);
  return {"pack_weight bfloat16 rows 16 cols 512", kPanelRows * kCols, [=, &table] {
            table.pack_panel[kBf16](
                {weight->data(), kBf16, kCols, kPanelRows, kCols, 0, 0, packed->data()});
          }};
}

std::vector<Case> cases_of(const KernelTable& table) {
  std::vector<Case> cases;
  for (const bool prefill : {false, true}) {
    for (int type = 0; type < kCacheTypes; ++type) cases.push_back(attention(table, prefill, type));
  }
  for (int format = 0; format < kPackedFormats; ++format) {
    for (int int8_activation = 0; int8_activation < 2; ++int8_activation) {
      const PackedLinearKernels& kernels = table.packed_linear[format][int8_activation];
      if (int8_activation == 1 && kernels.linear == table.packed_linear[format][0].linear) continue;
      for (const int64_t tokens : {1, 8}) {
        cases.push_back(linear(table, format, int8_activation, false, tokens));
      }
      cases.push_back(linear(table, format, int8_activation, true, 1));
    }
  }
  for (const char* name : {"exp_f32", "quantize_row", "merge_attention", "rope_row"}) {
    cases.push_back(rows_of(table, name));
  }
  cases.push_back(pack(table));
  return cases;
}

int main_of(int count, char** words) {
  if (count == 1) {
    for (const KernelTable* table : kernel_tables()) {
      if (missing_feature_bits(*table) == 0) std::puts(table->isa);
    }
    return 0;
  }
  for (const KernelTable* table : kernel_tables()) {
    if (std::string(table->isa) != words[1] || missing_feature_bits(*table) != 0) continue;
    for (const Case& item : cases_of(*table)) {
      if (count == 2) {
        std::printf("%s\t%lld\n", item.name.c_str(), static_cast<long long>(item.work));
      } else if (count == 4 && item.name == words[2]) {
        for (long i = std::strtol(words[3], nullptr, 10); i > 0; --i) item.run();
        return 0;
      }
    }
    if (count == 2) return 0;
  }
  std::fprintf(stderr, "usage: fasttps_instructions [ISA [CASE REPEATS]], of those it lists\n");
  return 2;
}

}  // namespace
}  // namespace fasttps::cpu

int main(int count, char** words) { return fasttps::cpu::main_of(count, words); }
