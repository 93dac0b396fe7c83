#pragma once
#include <string>
#include <vector>

#include "../machine.h"
#include "../program.h"

// Products of matrices with one vector, which are bound by reading the matrices: their rows are
// divided over all cores, and each shim channel streams the tiles of its cores from its own stretch
// of L3. A design may have several such products one after the other, a phase each: the vector of
// the next is what the last has written to L3 (paper 000, figure 4 and algorithm 4).
//
// A column's way, each channel serving half of its cores:
//   shim --tiles--> mem tile --distribute--> cores --rows--> mem tile, join --> shim
// The vector comes the same way as the tiles, before them, once for every core.
namespace fasttps::npu {

enum class TileFormat {
  kBf16,
  kInt4,  // unsigned 4 bits about 8, a bf16 scale for each group of a row
};

// How the matrices of a design are cut.
struct MatvecTiling {
  TileFormat format = TileFormat::kBf16;
  int64_t group_size = 0;  // columns that share a scale; 0 for bf16
  int columns = 0;         // of the machine that are used
  int cores_per_column = 0;
  int channels = 0;  // of each shim, that stream tiles
  int64_t tile_rows = 0;
  int64_t tile_cols = 0;
  int64_t tile_bytes = 0;

  int cores() const { return columns * cores_per_column; }
  int cores_per_channel() const { return cores_per_column / channels; }
  // Bytes of a vector as it lies in L3 for this design: whole elements of the tiles' FIFO.
  int64_t vector_bytes(int64_t elements) const;
  int64_t tiles_per_core(int64_t rows, int64_t cols) const {
    return rows / cores() / tile_rows * (cols / tile_cols);
  }
  int64_t matrix_bytes(int64_t rows, int64_t cols) const {
    return tiles_per_core(rows, cols) * cores() * tile_bytes;
  }
};

// Bytes of a tile: [tile_rows, tile_cols] bf16; or its quants [tile_rows, tile_cols / 2], columns
// 2i in the low halves, then scales [tile_rows, tile_cols / group_size].
int64_t matvec_tile_bytes(TileFormat format, int64_t rows, int64_t cols, int64_t group_size);

// int4 in groups of 32, 64 or 128; bf16 without. Throws std::invalid_argument.
void check_tile_format(const char* op, TileFormat format, int64_t group_size);

struct MatvecPhase {
  std::string name;
  int64_t rows = 0;  // of the matrix; of gate and up together where `gated`
  int64_t cols = 0;
  // Rows come in half tiles of gate and up in turn, and what is written is act(gate) * up: half as
  // many (paper 000, section 3.2, point 1).
  bool gated = false;
  int activation = 0;  // of silu_mul, where gated
  int vector = 0;      // argument that is read
  int weights = 0;     // argument with the matrix
  int result = 0;      // argument that is written
};

// The largest tiles that divide all phases and fit a core. Throws Incompatible with the reason.
MatvecTiling tile_matvec(const char* op, const std::vector<MatvecPhase>& phases, TileFormat format,
                         int64_t group_size, const Machine& machine);

// Adds FIFOs, links, cores and sequence of the phases to a program that has its arguments.
void add_matvec(Program& program, const std::vector<MatvecPhase>& phases,
                const MatvecTiling& tiling);

// Where tile `tile` of core `core` (counted along columns, then up) begins in the weights of a
// phase: channels one after the other, in each the tiles in order, in each tile's place its cores'.
int64_t matvec_tile_offset(const MatvecTiling& tiling, int64_t tiles_per_core, int core,
                           int64_t tile);

}  // namespace fasttps::npu
