#include "matvec.h"

#include <numeric>

#include "../device.h"

namespace fasttps::npu {
namespace {

constexpr int64_t kBf16Bytes = 2, kF32Bytes = 4, kWordBytes = 4;
constexpr int64_t kMostTileBytes = 8192, kMostTileRows = 16, kMostTileCols = 1024;
constexpr int kDepth = 2;
constexpr int64_t kStackBytes = 1024;

int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Values that a phase writes.
int64_t written(const MatvecPhase& phase) { return phase.gated ? phase.rows / 2 : phase.rows; }

int64_t largest_divisor(int64_t of, int64_t most, int64_t unit) {
  for (int64_t candidate = most / unit * unit; candidate > 0; candidate -= unit) {
    if (of % candidate == 0) return candidate;
  }
  return 0;
}

}  // namespace

int64_t matvec_tile_bytes(TileFormat format, int64_t rows, int64_t cols, int64_t group_size) {
  if (format == TileFormat::kBf16) return rows * cols * kBf16Bytes;
  return rows * (cols / 2 + cols / group_size * kBf16Bytes);
}

void check_tile_format(const char* op, TileFormat format, int64_t group_size) {
  const bool fits = format == TileFormat::kBf16
                        ? group_size == 0
                        : group_size == 32 || group_size == 64 || group_size == 128;
  if (!fits) {
    throw std::invalid_argument(std::string(op) + ": wanted a group_size of " +
                                (format == TileFormat::kBf16 ? "0 with bf16" : "32, 64 or 128") +
                                ", got " + std::to_string(group_size));
  }
}

int64_t MatvecTiling::vector_bytes(int64_t elements) const {
  return round_up(elements * kBf16Bytes, tile_bytes);
}

int64_t matvec_tile_offset(const MatvecTiling& tiling, int64_t tiles_per_core, int core,
                           int64_t tile) {
  const int of_channel = tiling.cores_per_channel();
  const int64_t channel = core / of_channel, place = core % of_channel;
  return ((channel * tiles_per_core + tile) * of_channel + place) * tiling.tile_bytes;
}

MatvecTiling tile_matvec(const char* op, const std::vector<MatvecPhase>& phases, TileFormat format,
                         int64_t group_size, const Machine& machine) {
  const auto fail = [&](const std::string& reason) {
    throw Incompatible(std::string(op) + " on " + machine.name + ": " + reason);
  };
  MatvecTiling tiling;
  tiling.format = format;
  tiling.group_size = group_size;
  tiling.cores_per_column = machine.core_rows;
  tiling.channels = machine.core_rows % 2 == 0 && machine.shim.channels_out >= 2 ? 2 : 1;
  // Bytes of rows: a tile's rows divide those of every core in every phase.
  int64_t all_rows = 0, all_cols = 0, most_cols = 0;
  for (const MatvecPhase& phase : phases) {
    all_rows = std::gcd(all_rows, written(phase));
    all_cols = std::gcd(all_cols, phase.cols);
    most_cols = std::max(most_cols, phase.cols);
  }
  for (int columns = machine.shim_columns; columns > 0 && tiling.tile_rows == 0; --columns) {
    const int64_t cores = int64_t{columns} * tiling.cores_per_column;
    if (all_rows % cores != 0) continue;
    tiling.columns = columns;
    // Even: halves of gate and up, and words of 4 bytes for two results.
    tiling.tile_rows = largest_divisor(all_rows / cores, kMostTileRows, 2);
  }
  if (tiling.tile_rows == 0) {
    fail("rows in a multiple of twice the cores of a column wanted, got " +
         std::to_string(all_rows) + " as common divisor");
  }
  const int64_t unit = format == TileFormat::kBf16 ? 32 : std::lcm<int64_t>(32, group_size);
  int64_t most = kMostTileCols;
  while (most > unit &&
         matvec_tile_bytes(format, tiling.tile_rows, most, group_size) > kMostTileBytes) {
    most -= unit;
  }
  tiling.tile_cols = largest_divisor(all_cols, most, unit);
  if (tiling.tile_cols == 0) {
    fail("columns in a multiple of " + std::to_string(unit) + " wanted, got " +
         std::to_string(all_cols) + " as common divisor");
  }
  tiling.tile_bytes = matvec_tile_bytes(format, tiling.tile_rows, tiling.tile_cols, group_size);
  const int64_t needed = tiling.vector_bytes(most_cols) + kDepth * tiling.tile_bytes +
                         tiling.tile_rows * (kF32Bytes + kDepth * kBf16Bytes) + kStackBytes;
  if (needed > machine.core.memory_bytes) {
    fail("a vector of " + std::to_string(most_cols) + " and two tiles take " +
         std::to_string(needed) + " bytes of a core's " +
         std::to_string(machine.core.memory_bytes));
  }
  return tiling;
}

namespace {

// The numbers of a column's FIFOs.
struct ColumnFifos {
  std::vector<int> tiles;  // of each channel, to the mem tile
  std::vector<int> tiles_of_core;
  std::vector<int> rows_of_core;
  int rows = 0;  // joined, to the shim
};

class MatvecBuilder {
 public:
  MatvecBuilder(Program& program, const std::vector<MatvecPhase>& phases,
                const MatvecTiling& tiling)
      : program_(program), phases_(phases), tiling_(tiling) {}

  void add() {
    for (int column = 0; column < tiling_.columns; ++column) add_column(column);
    for (const MatvecPhase& phase : phases_) add_sequence(phase);
  }

 private:
  int add_fifo(Fifo fifo) {
    program_.fifos.push_back(std::move(fifo));
    return static_cast<int>(program_.fifos.size()) - 1;
  }

  void add_column(int column) {
    const Tile shim{column, 0}, mem{column, 1};
    const std::string c = std::to_string(column);
    const int of_channel = tiling_.cores_per_channel();
    const int64_t row_bytes = tiling_.tile_rows * kBf16Bytes;
    ColumnFifos fifos;
    for (int channel = 0; channel < tiling_.channels; ++channel) {
      const std::string name = "tiles_" + c + "_" + std::to_string(channel);
      fifos.tiles.push_back(add_fifo({.name = name,
                                      .element_bytes = of_channel * tiling_.tile_bytes,
                                      .producer = {.tile = shim, .depth = 0},
                                      .consumers = {{.tile = mem, .depth = kDepth}}}));
      Link link{.tile = mem, .inputs = {fifos.tiles.back()}};
      for (int i = 0; i < of_channel; ++i) {
        const int core = channel * of_channel + i;
        fifos.tiles_of_core.push_back(
            add_fifo({.name = name + "_" + std::to_string(i),
                      .element_bytes = tiling_.tile_bytes,
                      .producer = {.tile = mem, .depth = kDepth},
                      .consumers = {{.tile = {column, 2 + core}, .depth = kDepth}}}));
        link.outputs.push_back(fifos.tiles_of_core.back());
        link.offsets_bytes.push_back(i * tiling_.tile_bytes);
      }
      program_.links.push_back(link);
    }
    fifos.rows = add_fifo({.name = "rows_" + c,
                           .element_bytes = tiling_.cores_per_column * row_bytes,
                           .producer = {.tile = mem, .depth = kDepth},
                           .consumers = {{.tile = shim, .depth = 0}}});
    Link join{.tile = mem, .outputs = {fifos.rows}};
    for (int core = 0; core < tiling_.cores_per_column; ++core) {
      fifos.rows_of_core.push_back(
          add_fifo({.name = "rows_" + c + "_" + std::to_string(core),
                    .element_bytes = row_bytes,
                    .producer = {.tile = {column, 2 + core}, .depth = kDepth},
                    .consumers = {{.tile = mem, .depth = kDepth}}}));
      join.inputs.push_back(fifos.rows_of_core.back());
      join.offsets_bytes.push_back(core * row_bytes);
      add_core(column, core, fifos);
    }
    program_.links.push_back(join);
    columns_.push_back(std::move(fifos));
  }

  void add_core(int column, int core, const ColumnFifos& fifos) {
    int64_t vector_bytes = 0;
    for (const MatvecPhase& phase : phases_) {
      vector_bytes = std::max(vector_bytes, tiling_.vector_bytes(phase.cols));
    }
    const auto at = static_cast<size_t>(core);
    Core made{.tile = {column, 2 + core}, .stack_bytes = kStackBytes};
    made.scratch = {{"vector", vector_bytes}, {"sums", tiling_.tile_rows * kF32Bytes}};
    for (const MatvecPhase& phase : phases_) {
      add_phase(made.body, phase, fifos.tiles_of_core[at], fifos.rows_of_core[at]);
    }
    program_.cores.push_back(std::move(made));
  }

  // vector: for each of its elements, keep it
  // for each tile of results: for each half of it where gated: for each tile of the row: multiply
  void add_phase(Body& body, const MatvecPhase& phase, int tiles, int rows) {
    constexpr int kVector = 0, kSums = 1, kTile = 0, kResult = 1;
    enum { kElement, kBlock, kHalf, kAlong };
    const Statement take{Acquire{.fifo = tiles, .port = Port::kConsume, .acquired = kTile}};
    const Statement give{Release{.fifo = tiles, .port = Port::kConsume}};
    const int64_t elements = tiling_.vector_bytes(phase.cols) / tiling_.tile_bytes;
    body.push_back({Loop{
        kElement,
        elements,
        {take,
         {Call{"copy",
               {Held{kTile}, OfScratch{kVector, Expression::index(kElement) * tiling_.tile_bytes},
                Expression(tiling_.tile_bytes)}}},
         give}}});
    std::vector<KernelArgument> product{
        Held{kTile},
        OfScratch{kVector, Expression::index(kAlong) * (tiling_.tile_cols * kBf16Bytes)},
        OfScratch{kSums}, Expression(tiling_.tile_rows), Expression(tiling_.tile_cols)};
    if (tiling_.format == TileFormat::kInt4) {
      product.insert(product.end(), {Expression(tiling_.group_size), Expression(0)});
    }
    // The first tile of a row begins the sums.
    product.push_back(Expression(1) - min(Expression::index(kAlong), 1));
    const char* kernel = tiling_.format == TileFormat::kBf16 ? "gemv" : "gemv_int4";
    Body block{
        {Loop{kAlong, phase.cols / tiling_.tile_cols, {take, {Call{kernel, product}}, give}}}};
    if (phase.gated) {
      const int64_t half = tiling_.tile_rows / 2;
      block.push_back({Call{"silu_mul",
                            {OfScratch{kSums}, OfScratch{kSums, half * kF32Bytes},
                             Held{kResult, Expression::index(kHalf) * (half * kBf16Bytes)},
                             Expression(half), Expression(phase.activation)}}});
      block = {{Loop{kHalf, 2, block}}};
    } else {
      block.push_back(
          {Call{"f32_to_bf16", {OfScratch{kSums}, Held{kResult}, Expression(tiling_.tile_rows)}}});
    }
    block.insert(block.begin(),
                 {Acquire{.fifo = rows, .port = Port::kProduce, .acquired = kResult}});
    block.push_back({Release{.fifo = rows, .port = Port::kProduce}});
    body.push_back({Loop{kBlock, written(phase) / tiling_.cores() / tiling_.tile_rows, block}});
  }

  void add_sequence(const MatvecPhase& phase) {
    const int of_channel = tiling_.cores_per_channel();
    const int64_t tile_words = tiling_.tile_bytes / kWordBytes;
    const int64_t elements = tiling_.vector_bytes(phase.cols) / tiling_.tile_bytes;
    const int64_t tiles = tiling_.tiles_per_core(phase.rows, phase.cols);
    const int64_t channel_words = tiles * of_channel * tile_words;
    const int64_t rows_of_core = written(phase) / tiling_.cores();
    const int64_t row_words = tiling_.tile_rows * kBf16Bytes / kWordBytes;
    const int64_t core_words = rows_of_core * kBf16Bytes / kWordBytes;
    const auto move = [&](const std::string& name, int argument, int fifo, int64_t offset,
                          Walk walk) {
      program_.sequence.push_back(Move{.name = phase.name + "_" + name,
                                       .argument = argument,
                                       .fifo = fifo,
                                       .offset = offset,
                                       .walk = std::move(walk)});
    };
    for (int c = 0; c < tiling_.columns; ++c) {
      const ColumnFifos& fifos = columns_[static_cast<size_t>(c)];
      const std::string column = std::to_string(c);
      for (int channel = 0; channel < tiling_.channels; ++channel) {
        const int fifo = fifos.tiles[static_cast<size_t>(channel)];
        const std::string of = column + "_" + std::to_string(channel);
        move("vector_" + of, phase.vector, fifo, 0,
             {{elements, tile_words}, {of_channel, 0}, {tile_words, 1}});
        move("tiles_" + of, phase.weights, fifo,
             (int64_t{c} * tiling_.channels + channel) * channel_words, {{channel_words, 1}});
      }
      // Of each tile of rows, that of every core; a core's rows lie side by side.
      move("rows_" + column, phase.result, fifos.rows,
           int64_t{c} * tiling_.cores_per_column * core_words,
           {{rows_of_core / tiling_.tile_rows, row_words},
            {tiling_.cores_per_column, core_words},
            {row_words, 1}});
    }
    for (int c = 0; c < tiling_.columns; ++c) {
      program_.sequence.push_back(Await{phase.name + "_rows_" + std::to_string(c)});
    }
  }

  Program& program_;
  const std::vector<MatvecPhase>& phases_;
  const MatvecTiling& tiling_;
  std::vector<ColumnFifos> columns_;
};

}  // namespace

void add_matvec(Program& program, const std::vector<MatvecPhase>& phases,
                const MatvecTiling& tiling) {
  MatvecBuilder(program, phases, tiling).add();
}

}  // namespace fasttps::npu
