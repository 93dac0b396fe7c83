#include "rope_attention_decode.h"

#include <bit>
#include <cmath>

#include "../device.h"
#include "sizes.h"

namespace fasttps::npu {
namespace {

constexpr const char* kOp = "rope_attention_decode";
constexpr int64_t kBf16Bytes = 2, kF32Bytes = 4, kWordBytes = 4;
constexpr int64_t kMostBlockBytes = 8192, kStackBytes = 1024;
constexpr int kDepth = 2;
enum { kQuery, kKey, kValue, kCos, kSin, kKCache, kVCache, kOutput };
enum { kScores, kSums, kQueries, kResults };  // scratch

// What comes first for each KV head, in one element: its queries, key, value, and the table.
struct Token {
  int64_t query, key, value, cos, sin, end;  // offsets in bytes

  explicit Token(const RopeAttentionDecodeSizes& sizes) {
    const int64_t row = sizes.head_dim * kBf16Bytes, table = sizes.rotary_dim * kF32Bytes;
    query = 0;
    key = sizes.num_heads / sizes.num_kv_heads * row;
    value = key + row;
    cos = value + row;
    sin = cos + table;
    end = sin + table;
  }
};

[[noreturn]] void fail(const Machine& machine, const std::string& reason) {
  throw Incompatible(std::string(kOp) + " on " + machine.name + ": " + reason);
}

DecodePlacement place(const RopeAttentionDecodeSizes& sizes, const Machine& machine) {
  const int64_t group = sizes.num_heads / sizes.num_kv_heads;
  const int cores = machine.core_rows;
  DecodePlacement found{};
  found.cores_per_head = 1;
  for (int share = cores; share > 1; --share) {
    if (cores % share == 0 && group % share == 0) {
      found.cores_per_head = share;
      break;
    }
  }
  found.query_rows = group / found.cores_per_head;
  // As many columns as divide the heads, and then as few waves: DRAM is reached by columns.
  for (int columns = machine.shim_columns; columns > 0; --columns) {
    if (sizes.num_kv_heads % columns != 0) continue;
    found.columns = columns;
    const int64_t each = sizes.num_kv_heads / columns;
    int most = cores / found.cores_per_head;
    while (each % most != 0) --most;
    found.heads_per_column = most;
    found.waves = each / most;
    break;
  }
  found.lanes = found.heads_per_column % 2 == 0 && machine.shim.channels_out >= 2 ? 2 : 1;

  const int64_t row = sizes.head_dim * kBf16Bytes;
  found.block_rows = 1;
  while (2 * found.block_rows * row <= kMostBlockBytes &&
         sizes.max_seq_len % (2 * found.block_rows) == 0) {
    found.block_rows *= 2;
  }
  found.block_bytes = found.block_rows * row;
  const Token token(sizes);
  if (token.end > found.block_bytes) {
    fail(machine, "a KV head's queries, key, value and table have " + std::to_string(token.end) +
                      " bytes, a block of the cache " + std::to_string(found.block_bytes) +
                      "; wanted a max_seq_len with larger powers of two, or fewer query heads");
  }
  const int64_t needed = kDepth * (found.block_bytes + row) + kStackBytes +
                         found.query_rows * (sizes.max_seq_len * kF32Bytes + kF32Bytes + row +
                                             sizes.head_dim * kF32Bytes);
  if (needed > machine.core.memory_bytes) {
    fail(machine, std::to_string(found.query_rows) + " rows of " +
                      std::to_string(sizes.max_seq_len) + " scores and two blocks take " +
                      std::to_string(needed) + " bytes of a core's " +
                      std::to_string(machine.core.memory_bytes));
  }
  return found;
}

class DecodeBuilder {
 public:
  DecodeBuilder(Program& program, const RopeAttentionDecodeSizes& sizes,
                const DecodePlacement& placement)
      : program_(program), sizes_(sizes), at_(placement), row_bytes_(sizes.head_dim * kBf16Bytes) {}

  void add() {
    for (int column = 0; column < at_.columns; ++column) add_column(column);
    for (int64_t wave = 0; wave < at_.waves; ++wave) add_wave(wave);
  }

 private:
  struct Column {
    std::vector<int> blocks;  // of each lane
    int rows = 0;
  };

  int add_fifo(Fifo fifo) {
    program_.fifos.push_back(std::move(fifo));
    return static_cast<int>(program_.fifos.size()) - 1;
  }

  // shim --blocks of a lane's heads--> mem tile --each head's, broadcast--> its cores
  // cores --rows--> mem tile, joined --> shim
  void add_column(int column) {
    const Tile shim{column, 0}, mem{column, 1};
    const std::string c = std::to_string(column);
    const int cores = at_.heads_per_column * at_.cores_per_head;
    Column made;
    Link join{.tile = mem};
    made.rows = add_fifo({.name = "rows_" + c,
                          .element_bytes = cores * row_bytes_,
                          .producer = {.tile = mem, .depth = kDepth},
                          .consumers = {{.tile = shim, .depth = 0}}});
    join.outputs = {made.rows};
    for (int lane = 0; lane < at_.lanes; ++lane) {
      const std::string name = "blocks_" + c + "_" + std::to_string(lane);
      made.blocks.push_back(add_fifo({.name = name,
                                      .element_bytes = at_.heads_per_lane() * at_.block_bytes,
                                      .producer = {.tile = shim, .depth = 0},
                                      .consumers = {{.tile = mem, .depth = kDepth}}}));
      Link link{.tile = mem, .inputs = {made.blocks.back()}};
      for (int h = 0; h < at_.heads_per_lane(); ++h) {
        const int head = lane * at_.heads_per_lane() + h;
        Fifo blocks{.name = name + "_" + std::to_string(h),
                    .element_bytes = at_.block_bytes,
                    .producer = {.tile = mem, .depth = kDepth}};
        for (int i = 0; i < at_.cores_per_head; ++i) {
          const int core = head * at_.cores_per_head + i;
          blocks.consumers.push_back({.tile = {column, 2 + core}, .depth = kDepth});
        }
        const int of_head = add_fifo(std::move(blocks));
        link.outputs.push_back(of_head);
        link.offsets_bytes.push_back(h * at_.block_bytes);
        for (int i = 0; i < at_.cores_per_head; ++i) {
          const int core = head * at_.cores_per_head + i;
          const int rows = add_fifo({.name = "rows_" + c + "_" + std::to_string(core),
                                     .element_bytes = row_bytes_,
                                     .producer = {.tile = {column, 2 + core}, .depth = kDepth},
                                     .consumers = {{.tile = mem, .depth = kDepth}}});
          join.inputs.push_back(rows);
          join.offsets_bytes.push_back(core * row_bytes_);
          add_core({column, 2 + core}, of_head, rows, i);
        }
      }
      program_.links.push_back(link);
    }
    program_.links.push_back(join);
    columns_.push_back(std::move(made));
  }

  // Algorithm 3, steps 6 to 12, of one KV head and `query_rows` of its query heads.
  void add_core(Tile tile, int blocks, int rows, int share) {
    const int64_t d = sizes_.head_dim, slots = sizes_.max_seq_len, n = at_.block_rows;
    const Token token(sizes_);
    const Expression length = Expression::scalar(0) + 1;
    enum { kWave, kBlock, kRow, kBlockOfValues };
    constexpr int kHere = 0, kOut = 1;
    const Statement take{Acquire{.fifo = blocks, .port = Port::kConsume, .acquired = kHere}};
    const Statement give{Release{.fifo = blocks, .port = Port::kConsume}};
    const Statement room{Acquire{.fifo = rows, .port = Port::kProduce, .acquired = kOut}};
    const Statement send{Release{.fifo = rows, .port = Port::kProduce}};
    const auto rope = [&](int64_t from, const KernelArgument& to, int64_t count) {
      return Statement{Call{
          "rope",
          {Held{kHere, from}, Held{kHere, token.cos}, Held{kHere, token.sin}, to, Expression(count),
           Expression(d), Expression(sizes_.rotary_dim), Expression(sizes_.interleaved ? 1 : 0)}}};
    };
    // In base 2: 2^(s log2 e) is e^s.
    const double scale = sizes_.scale != 0 ? sizes_.scale : 1 / std::sqrt(static_cast<double>(d));
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(scale * 1.4426950408889634));
    const auto first = [&](int loop) { return Expression::index(loop) * n; };
    const auto count = [&](int loop) { return min(Expression(n), length - first(loop)); };
    const int64_t query_bytes = share * at_.query_rows * row_bytes_;

    Body head{take,
              rope(token.query + query_bytes, OfScratch{kQueries}, at_.query_rows),
              room,
              rope(token.key, Held{kOut}, 1),
              send,
              room,
              {Call{"copy", {Held{kHere, token.value}, Held{kOut}, Expression(row_bytes_)}}},
              send,
              give};
    head.push_back({Loop{
        kBlock,
        ceil_div(length, n),
        {take,
         {Call{"decode_scores",
               {OfScratch{kQueries}, Held{kHere}, OfScratch{kScores}, Expression(at_.query_rows),
                Expression(d), Expression(slots), first(kBlock), count(kBlock), Expression(bits)}}},
         give}}});
    head.push_back({Call{"decode_softmax",
                         {OfScratch{kScores}, OfScratch{kSums}, Expression(at_.query_rows),
                          Expression(slots), length}}});
    head.push_back({Loop{
        kBlockOfValues,
        ceil_div(length, n),
        {take,
         {Call{"decode_values",
               {OfScratch{kScores}, Held{kHere}, OfScratch{kResults}, Expression(at_.query_rows),
                Expression(d), Expression(slots), first(kBlockOfValues), count(kBlockOfValues)}}},
         give}}});
    head.push_back({Loop{
        kRow,
        at_.query_rows,
        {room,
         {Call{"decode_finish",
               {OfScratch{kResults, Expression::index(kRow) * (d * kF32Bytes)},
                OfScratch{kSums, Expression::index(kRow) * kF32Bytes}, Held{kOut}, Expression(d)}}},
         send}}});
    Core core{.tile = tile, .stack_bytes = kStackBytes};
    core.scratch = {{"scores", at_.query_rows * slots * kF32Bytes},
                    {"sums", at_.query_rows * kF32Bytes},
                    {"queries", at_.query_rows * row_bytes_},
                    {"results", at_.query_rows * d * kF32Bytes}};
    core.body = {{Loop{kWave, at_.waves, head}}};
    program_.cores.push_back(std::move(core));
  }

  void move(const std::string& name, int argument, int fifo, const Expression& offset, Walk walk) {
    program_.sequence.push_back(Move{.name = name,
                                     .argument = argument,
                                     .fifo = fifo,
                                     .offset = offset,
                                     .walk = std::move(walk)});
  }
  void await(const std::string& name) { program_.sequence.push_back(Await{name}); }

  // The KV heads of one wave: heads of a column lie side by side.
  void add_wave(int64_t wave) {
    const int64_t row = row_bytes_ / kWordBytes, slots = sizes_.max_seq_len;
    const int64_t group = sizes_.num_heads / sizes_.num_kv_heads;
    const Expression position = Expression::scalar(0);
    const std::string of_wave = std::to_string(wave) + "_";
    const auto for_columns = [&](const auto& what) {
      for (int c = 0; c < at_.columns; ++c) {
        what(columns_[static_cast<size_t>(c)],
             wave * at_.heads_per_wave() + int64_t{c} * at_.heads_per_column,
             of_wave + std::to_string(c));
      }
    };
    const auto for_lanes = [&](const auto& what) {
      for_columns([&](const Column& column, int64_t head, const std::string& name) {
        for (int lane = 0; lane < at_.lanes; ++lane) {
          what(column.blocks[static_cast<size_t>(lane)],
               head + int64_t{lane} * at_.heads_per_lane(), name + "_" + std::to_string(lane));
        }
      });
    };

    for_lanes([&](int fifo, int64_t first, const std::string& name) {
      for (int64_t head = first; head < first + at_.heads_per_lane(); ++head) {
        const std::string of = name + "_" + std::to_string(head - first);
        move("query_" + of, kQuery, fifo, head * group * row, {{group * row, 1}});
        move("key_" + of, kKey, fifo, head * row, {{row, 1}});
        move("value_" + of, kValue, fifo, head * row, {{row, 1}});
        move("cos_" + of, kCos, fifo, 0, {{sizes_.rotary_dim, 1}});
        move("sin_" + of, kSin, fifo, 0, {{sizes_.rotary_dim, 1}});
        // The rest of the element is of no meaning.
        const int64_t rest = (at_.block_bytes - Token(sizes_).end) / kWordBytes;
        if (rest > 0) move("rest_" + of, kKCache, fifo, 0, {{rest, 1}});
      }
    });
    // Cores that share a head write its row to the same place.
    for_columns([&](const Column& column, int64_t head, const std::string& name) {
      for (const bool values : {false, true}) {
        move((values ? "new_value_" : "new_key_") + name, values ? kVCache : kKCache, column.rows,
             (head * slots + position) * row,
             {{at_.heads_per_column, slots * row}, {at_.cores_per_head, 0}, {row, 1}});
      }
    });
    // The rows of this token are read again, with all others. Keys go before values on a channel.
    for_columns(
        [&](const Column&, int64_t, const std::string& name) { await("new_value_" + name); });
    const int64_t block = at_.block_rows * row;
    for (const bool values : {false, true}) {
      for_lanes([&](int fifo, int64_t head, const std::string& name) {
        move((values ? "values_" : "keys_") + name, values ? kVCache : kKCache, fifo,
             head * slots * row,
             {{ceil_div(position + 1, at_.block_rows), block},
              {at_.heads_per_lane(), slots * row},
              {block, 1}});
      });
    }
    // [heads_per_column, cores_per_head, query_rows, head_dim] in memory, query_rows outermost
    // here.
    for_columns([&](const Column& column, int64_t head, const std::string& name) {
      const int64_t core_row = at_.query_rows * row;
      move("output_" + name, kOutput, column.rows, head * group * row,
           {{at_.query_rows, row},
            {int64_t{at_.heads_per_column} * at_.cores_per_head, core_row},
            {row, 1}});
    });
    for_columns([&](const Column&, int64_t, const std::string& name) { await("output_" + name); });
  }

  Program& program_;
  const RopeAttentionDecodeSizes& sizes_;
  const DecodePlacement& at_;
  int64_t row_bytes_;
  std::vector<Column> columns_;
};

}  // namespace

LoweredDecode lower_rope_attention_decode(const RopeAttentionDecodeSizes& sizes,
                                          const Machine& machine) {
  check_sizes(kOp, {{"num_heads", sizes.num_heads},
                    {"num_kv_heads", sizes.num_kv_heads},
                    {"head_dim", sizes.head_dim},
                    {"rotary_dim", sizes.rotary_dim},
                    {"max_seq_len", sizes.max_seq_len}});
  const auto wrong = [](const std::string& wanted, int64_t got) {
    throw std::invalid_argument(std::string(kOp) + ": wanted " + wanted + ", got " +
                                std::to_string(got));
  };
  if (sizes.num_heads % sizes.num_kv_heads != 0) {
    wrong("num_heads in a multiple of num_kv_heads = " + std::to_string(sizes.num_kv_heads),
          sizes.num_heads);
  }
  if (sizes.rotary_dim % 2 != 0 || sizes.rotary_dim > sizes.head_dim) {
    wrong("an even rotary_dim of at most head_dim = " + std::to_string(sizes.head_dim),
          sizes.rotary_dim);
  }
  if (!std::isfinite(static_cast<float>(sizes.scale))) {
    throw std::invalid_argument(std::string(kOp) + ": wanted a finite scale");
  }
  if (sizes.head_dim % 32 != 0) {
    fail(machine, "head_dim in a multiple of a vector's 32 elements wanted, got " +
                      std::to_string(sizes.head_dim));
  }
  LoweredDecode made;
  made.placement = place(sizes, machine);
  const int64_t row = sizes.head_dim * kBf16Bytes, table = sizes.rotary_dim * kF32Bytes;
  const int64_t cache = sizes.num_kv_heads * sizes.max_seq_len * row;
  Program& program = made.program;
  program.name = kOp;
  program.scalars = {"position"};
  program.arguments = {{"query", sizes.num_heads * row, Access::kIn},
                       {"key", sizes.num_kv_heads * row, Access::kIn},
                       {"value", sizes.num_kv_heads * row, Access::kIn},
                       {"cos", table, Access::kIn},
                       {"sin", table, Access::kIn},
                       {"k_cache", cache, Access::kInOut},
                       {"v_cache", cache, Access::kInOut},
                       {"output", sizes.num_heads * row, Access::kOut}};
  DecodeBuilder(program, sizes, made.placement).add();
  return made;
}

}  // namespace fasttps::npu
