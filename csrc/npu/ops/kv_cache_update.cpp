#include "kv_cache_update.h"

#include "../device.h"
#include "sizes.h"

namespace fasttps::npu {
namespace {

constexpr const char* kOp = "kv_cache_update";
constexpr int64_t kBf16Bytes = 2, kWordBytes = 4;
constexpr int kDepth = 2;

// One tensor's way: argument `from`, through the mem tile of a column, to argument `to`.
void add_way(Program& program, const KvCacheUpdateSizes& sizes, const std::string& what, int column,
             int from, int to) {
  const int64_t words = sizes.head_dim * kBf16Bytes / kWordBytes;
  const int64_t token_bytes = sizes.num_kv_heads * sizes.head_dim * kBf16Bytes;
  const Tile shim{column, 0}, mem{column, 1};
  const int in = static_cast<int>(program.fifos.size()), out = in + 1;
  program.fifos.push_back({.name = what + "_in",
                           .element_bytes = token_bytes,
                           .producer = {.tile = shim, .depth = 0},
                           .consumers = {{.tile = mem, .depth = kDepth}}});
  program.fifos.push_back({.name = what + "_out",
                           .element_bytes = token_bytes,
                           .producer = {.tile = mem, .depth = kDepth},
                           .consumers = {{.tile = shim, .depth = 0}}});
  program.links.push_back({.tile = mem, .inputs = {in}, .outputs = {out}, .offsets_bytes = {0}});

  const int64_t new_words = sizes.new_tokens * sizes.num_kv_heads * words;
  const int64_t head_words = sizes.max_seq_len * words;
  for (int64_t b = 0; b < sizes.batch; ++b) {
    const std::string of = what + "_" + std::to_string(b);
    program.sequence.push_back(Move{.name = of + "_in",
                                    .argument = from,
                                    .fifo = in,
                                    .offset = b * new_words,
                                    .walk = {{new_words, 1}}});
    // In the order of the new tokens: [new_tokens, num_kv_heads, head_dim].
    program.sequence.push_back(
        Move{.name = of + "_out",
             .argument = to,
             .fifo = out,
             .offset = Expression(b * sizes.num_kv_heads * head_words) +
                       Expression::scalar(static_cast<int>(b)) * words,
             .walk = {{sizes.new_tokens, words}, {sizes.num_kv_heads, head_words}, {words, 1}}});
  }
}

}  // namespace

Program lower_kv_cache_update(const KvCacheUpdateSizes& sizes, const Machine& machine) {
  check_sizes(kOp, {{"batch", sizes.batch},
                    {"new_tokens", sizes.new_tokens},
                    {"num_kv_heads", sizes.num_kv_heads},
                    {"head_dim", sizes.head_dim},
                    {"max_seq_len", sizes.max_seq_len}});
  if (sizes.new_tokens > sizes.max_seq_len) {
    throw std::invalid_argument(
        std::string(kOp) + ": wanted at most max_seq_len = " + std::to_string(sizes.max_seq_len) +
        " new_tokens, got " + std::to_string(sizes.new_tokens));
  }
  const auto need = [&](bool fits, const std::string& reason) {
    if (!fits) throw Incompatible(std::string(kOp) + " on " + machine.name + ": " + reason);
  };
  need(
      sizes.head_dim * kBf16Bytes % kWordBytes == 0,
      "DMAs move words of 4 bytes; wanted an even head_dim, got " + std::to_string(sizes.head_dim));
  const int64_t token_bytes = sizes.num_kv_heads * sizes.head_dim * kBf16Bytes;
  need(kDepth * token_bytes <= machine.mem_tile.memory_bytes,
       "two tokens of all KV heads have " + std::to_string(kDepth * token_bytes) +
           " bytes, a mem tile " + std::to_string(machine.mem_tile.memory_bytes));
  need(machine.shim_columns >= 2,
       "wanted 2 columns with shims, got " + std::to_string(machine.shim_columns));

  Program program;
  program.name = kOp;
  const int64_t new_bytes = sizes.batch * sizes.new_tokens * token_bytes;
  const int64_t cache_bytes = sizes.batch * sizes.max_seq_len * token_bytes;
  program.arguments = {{"key", new_bytes, Access::kIn},
                       {"value", new_bytes, Access::kIn},
                       {"k_cache", cache_bytes, Access::kInOut},
                       {"v_cache", cache_bytes, Access::kInOut}};
  for (int64_t b = 0; b < sizes.batch; ++b) {
    program.scalars.push_back("position_" + std::to_string(b));
  }
  add_way(program, sizes, "key", 0, 0, 2);
  add_way(program, sizes, "value", 1, 1, 3);
  for (const char* what : {"key_", "value_"}) {
    program.sequence.push_back(Await{what + std::to_string(sizes.batch - 1) + "_out"});
  }
  return program;
}

}  // namespace fasttps::npu
