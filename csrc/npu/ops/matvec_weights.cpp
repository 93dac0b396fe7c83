#include "matvec_weights.h"

#include <cstring>
#include <stdexcept>

namespace fasttps::npu {

void pack_matvec(const MatvecPhase& phase, const MatvecTiling& tiling, const MatvecWeight& weight,
                 std::span<std::byte> packed) {
  const bool int4 = tiling.format == TileFormat::kInt4;
  const int64_t row_bytes = int4 ? phase.cols / 2 : phase.cols * 2;
  const int64_t scale_bytes = int4 ? phase.cols / tiling.group_size * 2 : 0;
  const auto check = [](const char* what, size_t got, int64_t wanted) {
    if (got != static_cast<size_t>(wanted)) {
      throw std::invalid_argument(std::string("pack_matvec: ") + what + " wanted " +
                                  std::to_string(wanted) + " bytes, got " + std::to_string(got));
    }
  };
  check("values", weight.values.size(), phase.rows * row_bytes);
  check("scales", weight.scales.size(), phase.rows * scale_bytes);
  check("packed", packed.size(), tiling.matrix_bytes(phase.rows, phase.cols));

  const int64_t along = phase.cols / tiling.tile_cols, tile_rows = tiling.tile_rows;
  const int64_t tiles = tiling.tiles_per_core(phase.rows, phase.cols);
  const int64_t tile_row_bytes = row_bytes / along, tile_scale_bytes = scale_bytes / along;
  // Rows of the matrix in one tile: of each half where gated.
  const int64_t step = phase.gated ? tile_rows / 2 : tile_rows;
  for (int core = 0; core < tiling.cores(); ++core) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      std::byte* to = packed.data() + matvec_tile_offset(tiling, tiles, core, tile);
      const int64_t first = (core * (tiles / along) + tile / along) * step;
      const int64_t column = tile % along;
      for (int64_t r = 0; r < tile_rows; ++r) {
        // Behind gate's rows, up's: rows / 2 further down.
        const int64_t row = r < step ? first + r : phase.rows / 2 + first + r - step;
        std::memcpy(to + r * tile_row_bytes,
                    weight.values.data() + row * row_bytes + column * tile_row_bytes,
                    static_cast<size_t>(tile_row_bytes));
        if (!int4) continue;
        std::memcpy(to + tile_rows * tile_row_bytes + r * tile_scale_bytes,
                    weight.scales.data() + row * scale_bytes + column * tile_scale_bytes,
                    static_cast<size_t>(tile_scale_bytes));
      }
    }
  }
}

}  // namespace fasttps::npu
