#pragma once
#include <string>

#include "program.h"

namespace fasttps::npu {

// shim (0, 0), mem tile (0, 1), (0, 2).
inline std::string tile_name(Tile tile) {
  const char* kind = tile.row == 0 ? "shim " : tile.row == 1 ? "mem tile " : "";
  return kind + ("(" + std::to_string(tile.column)) + ", " + std::to_string(tile.row) + ")";
}

}  // namespace fasttps::npu
