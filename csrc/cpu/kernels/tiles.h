#pragma once
#include <cstdint>

// Eight tile registers of up to 16 rows of up to 64 bytes (AMX), as a policy `Tiles`:
//   configure(config), release()    the shapes of the registers; all become zero
//   zero<t>()
//   load<t>(rows, stride_bytes), store<t>(rows, stride_bytes)
//   dot_bf16<c, a, b>()             c[m][n] += sum over k of a[m][2 k + i] b[k][2 n + i], i < 2
//   dot_s8u8<c, a, b>()             c[m][n] += sum over k of a[m][4 k + i] b[k][4 n + i], i < 4, of
//                                   signed with unsigned bytes, in int32
// isa/amx_tiles.h has the instructions, csrc/tests/emulated_tiles.h an emulation of them.
namespace fasttps::cpu {
namespace {

inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileRowBytes = 64;

// The operand of ldtilecfg. Registers of no rows and no bytes cannot be used.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows, int64_t tile_row_bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(tile_rows > 0 ? tile_row_bytes : 0);
  }
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace
}  // namespace fasttps::cpu
