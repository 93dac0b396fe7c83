#include "causal_prefill.h"

#include <bit>
#include <cmath>
#include <map>

#include "../device.h"
#include "sizes.h"

namespace fasttps::npu {
namespace {

constexpr const char* kOp = "causal_prefill";
constexpr int64_t kBf16Bytes = 2, kF32Bytes = 4, kWordBytes = 4;
constexpr int64_t kBlock = 64;  // queries, and keys
constexpr int64_t kTile = 8;    // of the multiplier
constexpr int64_t kStackBytes = 1024;
constexpr int kMostGroup = 5;
enum { kQuery, kKCache, kVCache, kOutput };

[[noreturn]] void fail(const Machine& machine, const std::string& reason) {
  throw Incompatible(std::string(kOp) + " on " + machine.name + ": " + reason);
}

// A pipeline up each column, and one along the top row for every three columns that are left.
PrefillPlacement place(const CausalPrefillSizes& sizes, const Machine& machine) {
  PrefillPlacement found;
  if (machine.core_rows < 3) {
    fail(machine, "three rows of cores wanted, got " + std::to_string(machine.core_rows));
  }
  for (int c = 0; c < machine.columns; ++c) {
    found.pipelines.push_back({Tile{c, 2}, Tile{c, 3}, Tile{c, 4}});
  }
  for (int c = 0; machine.core_rows >= 4 && c + 2 < machine.columns; c += 3) {
    found.pipelines.push_back({Tile{c, 5}, Tile{c + 1, 5}, Tile{c + 2, 5}});
  }
  const auto count = static_cast<int64_t>(found.pipelines.size());
  found.group = kMostGroup;
  while (count % found.group != 0) --found.group;
  const int64_t blocks = (sizes.tokens + kBlock - 1) / kBlock;
  found.rounds = (blocks + count - 1) / count;
  found.padded_tokens = found.rounds * count * kBlock;
  found.key_blocks = (sizes.offset + sizes.tokens + kBlock - 1) / kBlock;
  if (found.key_blocks * kBlock > sizes.max_seq_len) {
    fail(machine, "keys are read in blocks of 64: wanted a max_seq_len of " +
                      std::to_string(found.key_blocks * kBlock) + ", got " +
                      std::to_string(sizes.max_seq_len));
  }
  return found;
}

// In the multiplier's order: tiles of 8 x 8 of a block [64, cols] in rows. Units of 8 elements.
Walk in_tiles(int64_t cols) {
  const int64_t row = cols / kTile;
  return {{kBlock / kTile, kTile * row}, {row, 1}, {kTile, row}};
}
constexpr int64_t kTileRowBytes = kTile * kBf16Bytes;

class PrefillBuilder {
 public:
  PrefillBuilder(Program& program, const CausalPrefillSizes& sizes,
                 const PrefillPlacement& placement, const Machine& machine)
      : program_(program),
        sizes_(sizes),
        at_(placement),
        machine_(machine),
        block_bytes_(kBlock * sizes.head_dim * kBf16Bytes),
        count_(static_cast<int>(placement.pipelines.size())) {}

  void add() {
    for (int p = 0; p < count_; ++p) add_pipeline(p);
    const int streams = sizes_.broadcast_to_groups ? groups() : 1;
    for (int g = 0; g < groups(); ++g) queries_.push_back(add_queries(g));
    for (int g = 0; g < groups(); ++g) results_.push_back(add_results(g));
    for (int s = 0; s < streams; ++s) {
      keys_.push_back(add_broadcast("k_" + std::to_string(s), s, streams, 0));
      values_.push_back(add_broadcast("v_" + std::to_string(s), s, streams, 2));
    }
    for (int p = 0; p < count_; ++p) add_cores(p);
    for (int64_t head = 0; head < sizes_.num_heads; ++head) add_head(head);
    for (int g = 0; g < groups(); ++g) {
      program_.sequence.push_back(
          Await{"output_" + std::to_string(g) + "_" + std::to_string(sizes_.num_heads - 1)});
    }
  }

 private:
  struct Pipeline {
    int queries = 0, keys = 0, scores = 0, weights = 0, weights_in_tiles = 0, state = 0, values = 0,
        results = 0;
  };

  struct Ports {
    int64_t in = 0, out = 0, l3_in = 0, l3_out = 0;
  };

  int groups() const { return count_ / at_.group; }
  size_t member(int group, int i) const {
    return static_cast<size_t>(group) * static_cast<size_t>(at_.group) + static_cast<size_t>(i);
  }
  int add_fifo(Fifo fifo) {
    program_.fifos.push_back(std::move(fifo));
    return static_cast<int>(program_.fifos.size()) - 1;
  }

  // A mem tile with these channels left, and its shim: that of the column asked for, or the one
  // that has most.
  int take_mem_tile(const Ports& wanted, int column = -1) {
    const auto fits = [&](int c) {
      const Ports& used = ports_[c];
      return used.in + wanted.in <= machine_.mem_tile.channels_in &&
             used.out + wanted.out <= machine_.mem_tile.channels_out &&
             (wanted.l3_in + wanted.l3_out == 0 || c < machine_.shim_columns) &&
             used.l3_in + wanted.l3_in <= machine_.shim.channels_in &&
             used.l3_out + wanted.l3_out <= machine_.shim.channels_out;
    };
    const auto load = [&](int c) { return ports_[c].in + ports_[c].out; };
    int best = -1;
    for (int c = 0; c < machine_.columns; ++c) {
      if (fits(c) && (best < 0 || load(c) < load(best))) best = c;
    }
    if (column >= 0 && fits(column)) best = column;
    if (best < 0) {
      fail(machine_, "no mem tile has " + std::to_string(wanted.in) + " channels in and " +
                         std::to_string(wanted.out) + " out left");
    }
    Ports& used = ports_[best];
    used.in += wanted.in;
    used.out += wanted.out;
    used.l3_in += wanted.l3_in;
    used.l3_out += wanted.l3_out;
    return best;
  }

  // What passes between the cores of a pipeline.
  void add_pipeline(int p) {
    const auto& [scores, softmax, values] = at_.pipelines[static_cast<size_t>(p)];
    const std::string name = "_" + std::to_string(p);
    Pipeline made;
    const int64_t square = kBlock * kBlock;
    made.scores = add_fifo({.name = "scores" + name,
                            .element_bytes = (square + 2 * kBlock) * kF32Bytes,
                            .producer = {.tile = scores},
                            .consumers = {{.tile = softmax}},
                            .shared = true});
    made.state = add_fifo({.name = "state" + name,
                           .element_bytes = 2 * kBlock * kF32Bytes,
                           .producer = {.tile = softmax},
                           .consumers = {{.tile = values}},
                           .shared = true});
    // Through a mem tile, whose DMA puts the weights in tiles (section IV-A).
    const Tile mem{take_mem_tile({.in = 1, .out = 1}, softmax.row == 3 ? softmax.column : -1), 1};
    made.weights = add_fifo({.name = "weights" + name,
                             .element_bytes = square * kBf16Bytes,
                             .producer = {.tile = softmax},
                             .consumers = {{.tile = mem}}});
    made.weights_in_tiles = add_fifo({.name = "weights_in_tiles" + name,
                                      .element_bytes = square * kBf16Bytes,
                                      .unit_bytes = kTileRowBytes,
                                      .producer = {.tile = mem, .walk = in_tiles(kBlock)},
                                      .consumers = {{.tile = values}}});
    program_.links.push_back({.tile = mem,
                              .inputs = {made.weights},
                              .outputs = {made.weights_in_tiles},
                              .offsets_bytes = {0}});
    pipelines_.push_back(made);
  }

  // L3 -> mem tile, an element of a block for each pipeline of the group -> the pipelines.
  int add_queries(int g) {
    const Tile mem{take_mem_tile({.in = 1, .out = at_.group, .l3_out = 1}), 1};
    const std::string name = "q_" + std::to_string(g);
    const int in = add_fifo({.name = name,
                             .element_bytes = at_.group * block_bytes_,
                             .producer = {.tile = {mem.column, 0}, .depth = 0},
                             .consumers = {{.tile = mem, .depth = 1}}});
    Link link{.tile = mem, .inputs = {in}};
    for (int i = 0; i < at_.group; ++i) {
      Pipeline& pipeline = pipelines_[member(g, i)];
      // One deep: two, beside keys and scores, are more than a core has.
      pipeline.queries =
          add_fifo({.name = name + "_" + std::to_string(i),
                    .element_bytes = block_bytes_,
                    .unit_bytes = kTileRowBytes,
                    .producer = {.tile = mem, .depth = 1, .walk = in_tiles(sizes_.head_dim)},
                    .consumers = {{.tile = at_.pipelines[member(g, i)][0], .depth = 1}}});
      link.outputs.push_back(pipeline.queries);
      link.offsets_bytes.push_back(i * block_bytes_);
    }
    program_.links.push_back(link);
    return in;
  }

  int add_results(int g) {
    const Tile mem{take_mem_tile({.in = at_.group, .out = 1, .l3_in = 1}), 1};
    const std::string name = "o_" + std::to_string(g);
    const int out = add_fifo({.name = name,
                              .element_bytes = at_.group * block_bytes_,
                              .producer = {.tile = mem, .depth = 1},
                              .consumers = {{.tile = {mem.column, 0}, .depth = 0}}});
    Link link{.tile = mem, .outputs = {out}};
    for (int i = 0; i < at_.group; ++i) {
      Pipeline& pipeline = pipelines_[member(g, i)];
      pipeline.results = add_fifo({.name = name + "_" + std::to_string(i),
                                   .element_bytes = block_bytes_,
                                   .producer = {.tile = at_.pipelines[member(g, i)][2], .depth = 1},
                                   .consumers = {{.tile = mem, .depth = 1}}});
      link.inputs.push_back(pipeline.results);
      link.offsets_bytes.push_back(i * block_bytes_);
    }
    program_.links.push_back(link);
    return out;
  }

  // Keys to the first core of every pipeline of a stream, or values to the last.
  int add_broadcast(const std::string& name, int stream, int streams, size_t stage) {
    const Tile mem{take_mem_tile({.in = 1, .out = 1, .l3_out = 1}), 1};
    const int in = add_fifo({.name = name,
                             .element_bytes = block_bytes_,
                             .producer = {.tile = {mem.column, 0}, .depth = 0},
                             .consumers = {{.tile = mem}}});
    Fifo all{.name = name + "_all",
             .element_bytes = block_bytes_,
             .unit_bytes = kTileRowBytes,
             .producer = {.tile = mem, .walk = in_tiles(sizes_.head_dim)}};
    const int each = count_ / streams;
    for (int p = stream * each; p < (stream + 1) * each; ++p) {
      all.consumers.push_back({.tile = at_.pipelines[static_cast<size_t>(p)][stage]});
      Pipeline& pipeline = pipelines_[static_cast<size_t>(p)];
      (stage == 0 ? pipeline.keys : pipeline.values) = static_cast<int>(program_.fifos.size());
    }
    const int out = add_fifo(std::move(all));
    program_.links.push_back({.tile = mem, .inputs = {in}, .outputs = {out}, .offsets_bytes = {0}});
    return in;
  }

  // Algorithm 1. i, the block of queries, is the round's in this pipeline; j counts keys' blocks.
  void add_cores(int p) {
    enum { kHead, kRound, kColumn };
    const Pipeline& fifos = pipelines_[static_cast<size_t>(p)];
    const Expression round = Expression::index(kRound), j = Expression::index(kColumn);
    const Expression i = sizes_.sparsity_aware ? round * count_ + p : round + p * at_.rounds;
    const Expression d = sizes_.head_dim, tokens = sizes_.tokens, offset = sizes_.offset;
    const double scale =
        sizes_.scale != 0 ? sizes_.scale : 1 / std::sqrt(static_cast<double>(sizes_.head_dim));
    const Expression bits = std::bit_cast<uint32_t>(static_cast<float>(scale * 1.4426950408889634));
    const auto acquire = [](int fifo, Port port, int as) {
      return Statement{Acquire{.fifo = fifo, .port = port, .acquired = as}};
    };
    const auto release = [](int fifo, Port port) {
      return Statement{Release{.fifo = fifo, .port = port}};
    };
    constexpr Port kIn = Port::kConsume, kOut = Port::kProduce;
    const auto add = [&](size_t stage, std::vector<Scratch> scratch, Body before, Body each,
                         Body after) {
      Body of_round = std::move(before);
      of_round.push_back({Loop{kColumn, at_.key_blocks, std::move(each)}});
      of_round.insert(of_round.end(), after.begin(), after.end());
      Core core{.tile = at_.pipelines[static_cast<size_t>(p)][stage], .stack_bytes = kStackBytes};
      core.scratch = std::move(scratch);
      core.body = {
          {Loop{kHead, sizes_.num_heads, {{Loop{kRound, at_.rounds, std::move(of_round)}}}}}};
      program_.cores.push_back(std::move(core));
    };
    add(0, {{"most", kBlock * kF32Bytes}}, {acquire(fifos.queries, kIn, 0)},
        {acquire(fifos.keys, kIn, 1),
         acquire(fifos.scores, kOut, 2),
         {Call{"steel_scores",
               {Held{0}, Held{1}, Held{2}, OfScratch{0}, d, i, j, tokens, offset, bits}}},
         release(fifos.keys, kIn),
         release(fifos.scores, kOut)},
        {release(fifos.queries, kIn)});
    add(1, {{"sums", kBlock * kF32Bytes}}, {},
        {acquire(fifos.scores, kIn, 0),
         acquire(fifos.weights, kOut, 1),
         acquire(fifos.state, kOut, 2),
         {Call{"steel_softmax", {Held{0}, Held{1}, Held{2}, OfScratch{0}, i, j, tokens, offset}}},
         release(fifos.scores, kIn),
         release(fifos.weights, kOut),
         release(fifos.state, kOut)},
        {});
    add(2, {{"o", kBlock * sizes_.head_dim * kF32Bytes}, {"sums", kBlock * kF32Bytes}}, {},
        {acquire(fifos.weights_in_tiles, kIn, 0),
         acquire(fifos.values, kIn, 1),
         acquire(fifos.state, kIn, 2),
         {Call{"steel_values",
               {Held{0}, Held{1}, Held{2}, OfScratch{0}, OfScratch{1}, d, i, j, tokens, offset}}},
         release(fifos.weights_in_tiles, kIn),
         release(fifos.values, kIn),
         release(fifos.state, kIn)},
        {acquire(fifos.results, kOut, 3),
         {Call{"steel_finish", {OfScratch{0}, OfScratch{1}, Held{3}, d, i, tokens}}},
         release(fifos.results, kOut)});
  }

  // Every round of a head: a group's blocks of queries, all keys and values, the group's results.
  void add_head(int64_t head) {
    const int64_t row = sizes_.head_dim * kBf16Bytes / kWordBytes, token = sizes_.num_heads * row;
    const std::string of = "_" + std::to_string(head);
    const auto move = [&](const std::string& name, int argument, int fifo, int64_t offset,
                          Walk walk) {
      program_.sequence.push_back(Move{.name = name + of,
                                       .argument = argument,
                                       .fifo = fifo,
                                       .offset = offset,
                                       .walk = std::move(walk)});
    };
    // Tokens from one pipeline's block to the next one's, and from one round's to the next.
    const int64_t next = sizes_.sparsity_aware ? kBlock : at_.rounds * kBlock;
    const int64_t later = sizes_.sparsity_aware ? count_ * kBlock : kBlock;
    // A block of a wave's pipelines side by side is one dimension: 4 are all that a shim has.
    const Dimension rounds{at_.rounds, later * token}, words{row, 1};
    Walk blocks{rounds, {at_.group, next * token}, {kBlock, token}, words};
    if (sizes_.sparsity_aware) blocks = {rounds, {at_.group * kBlock, token}, words};
    for (int g = 0; g < groups(); ++g) {
      move("query_" + std::to_string(g), kQuery, queries_[static_cast<size_t>(g)],
           g * at_.group * next * token + head * row, blocks);
    }
    const int64_t kv = head / (sizes_.num_heads / sizes_.num_kv_heads);
    for (size_t s = 0; s < keys_.size(); ++s) {
      for (const bool is_value : {false, true}) {
        move((is_value ? "values_" : "keys_") + std::to_string(s), is_value ? kVCache : kKCache,
             is_value ? values_[s] : keys_[s], kv * sizes_.max_seq_len * row,
             {{at_.rounds, 0}, {at_.key_blocks * kBlock * row, 1}});
      }
    }
    for (int g = 0; g < groups(); ++g) {
      move("output_" + std::to_string(g), kOutput, results_[static_cast<size_t>(g)],
           g * at_.group * next * token + head * row, blocks);
    }
  }

  Program& program_;
  const CausalPrefillSizes& sizes_;
  const PrefillPlacement& at_;
  const Machine& machine_;
  int64_t block_bytes_;
  int count_;
  std::map<int, Ports> ports_;  // of columns
  std::vector<Pipeline> pipelines_;
  std::vector<int> queries_, results_, keys_, values_;
};

}  // namespace

LoweredPrefill lower_causal_prefill(const CausalPrefillSizes& sizes, const Machine& machine) {
  check_sizes(kOp, {{"num_heads", sizes.num_heads},
                    {"num_kv_heads", sizes.num_kv_heads},
                    {"head_dim", sizes.head_dim},
                    {"tokens", sizes.tokens},
                    {"max_seq_len", sizes.max_seq_len}});
  if (sizes.num_heads % sizes.num_kv_heads != 0) {
    throw std::invalid_argument(
        std::string(kOp) + ": wanted num_heads in a multiple of num_kv_heads = " +
        std::to_string(sizes.num_kv_heads) + ", got " + std::to_string(sizes.num_heads));
  }
  if (sizes.offset < 0 || !std::isfinite(static_cast<float>(sizes.scale))) {
    throw std::invalid_argument(
        std::string(kOp) + ": wanted an offset of 0 or more and a finite scale, got " +
        std::to_string(sizes.offset) + " and " + std::to_string(sizes.scale));
  }
  if (sizes.head_dim != 64) {
    fail(machine, "a head_dim of 64 wanted, whose blocks fit a core's memory, got " +
                      std::to_string(sizes.head_dim));
  }
  LoweredPrefill made;
  made.placement = place(sizes, machine);
  const int64_t row = sizes.head_dim * kBf16Bytes;
  const int64_t cache = sizes.num_kv_heads * sizes.max_seq_len * row;
  made.program.name = kOp;
  made.program.arguments = {
      {"query", made.placement.padded_tokens * sizes.num_heads * row, Access::kIn},
      {"k_cache", cache, Access::kInOut},
      {"v_cache", cache, Access::kInOut},
      {"output", made.placement.padded_tokens * sizes.num_heads * row, Access::kOut}};
  PrefillBuilder(made.program, sizes, made.placement, machine).add();
  return made;
}

}  // namespace fasttps::npu
