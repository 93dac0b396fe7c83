// Included after quantize_weight.h. GGUF blocks of 16 rows into a panel; a pure move of quants and
// scales. Blocks as in llama.cpp's ggml-common.h, d and m being f16:
//   Q4_0  32 columns: d, qs[16]; low halves are columns 0-15, high ones 16-31
//   Q4_1  32: d, m, qs[16]          Q8_0  32: d, q[32] signed
//   Q4_K  256: d, dmin, scales[12] of 6 bits (sc and mn of 8 sub-blocks), qs[128]
//   Q6_K  256: ql[128], qh[64], scales[16] signed, d
namespace fasttps::cpu {
namespace {

inline constexpr int64_t kQ4KBlockBytes = 144, kQ6KBlockBytes = 210;

// Four bytes that lie side by side, worked on at once.
inline uint32_t four_bytes(const uint8_t* at) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, at, 4);
  return bytes;
}

inline constexpr uint32_t kLowNibbles = 0x0f0f0f0f, kHighNibbles = 0xf0f0f0f0;

// A row's 32 quants into a run, four bits each: the low or the high ones of the bytes of `q`.
inline void move_nibbles(const uint8_t* q, bool high, int64_t row, uint8_t* run) {
  for (int64_t j = 0; j < 4; ++j) {
    const uint32_t first = four_bytes(q + 4 * j), second = four_bytes(q + 16 + 4 * j);
    const uint32_t bytes = high ? (first >> 4 & kLowNibbles) | (second & kHighNibbles)
                                : (first & kLowNibbles) | (second << 4 & kHighNibbles);
    __builtin_memcpy(run + 64 * j + 4 * row, &bytes, 4);
  }
}

struct Q40Block {
  using Weight = Int4Weight;
  static constexpr int64_t kBytes = 18, kCols = 32;
  static void repack(const uint8_t* block, int64_t r, uint8_t* group) {
    for (int64_t j = 0; j < 4; ++j) {
      __builtin_memcpy(group + 64 * j + 4 * r, block + 2 + 4 * j, 4);
    }
    __builtin_memcpy(group + kNibbleRunBytes + 2 * r, block, 2);
  }
};

struct Q41Block {
  using Weight = Int4MinWeight;
  static constexpr int64_t kBytes = 20, kCols = 32;
  static void repack(const uint8_t* block, int64_t r, uint8_t* group) {
    for (int64_t j = 0; j < 4; ++j) {
      __builtin_memcpy(group + 64 * j + 4 * r, block + 4 + 4 * j, 4);
    }
    __builtin_memcpy(group + kNibbleRunBytes + 2 * r, block, 2);
    __builtin_memcpy(group + kNibbleRunBytes + kScaleBytes + 2 * r, block + 2, 2);
  }
};

struct Q80Block {
  using Weight = Int8GroupWeight;
  static constexpr int64_t kBytes = 34, kCols = 32;
  static void repack(const uint8_t* block, int64_t r, uint8_t* group) {
    uint8_t q[32];
    for (int64_t i = 0; i < 32; ++i) q[i] = block[2 + i] ^ 0x80;  // + 128
    put_bytes(q, r, group);
    __builtin_memcpy(group + kByteRunBytes + 2 * r, block, 2);
  }
};

struct Q4KBlock {
  using Weight = Q4KWeight;
  static constexpr int64_t kBytes = kQ4KBlockBytes, kCols = 256;
  static void repack(const uint8_t* block, int64_t r, uint8_t* group) {
    const uint8_t* scales = block + 4;
    const uint8_t* qs = block + 16;
    for (int64_t run = 0; run < 8; ++run) {
      move_nibbles(qs + run / 2 * 32, run % 2 == 1, r, group + run * kNibbleRunBytes);
      uint8_t sc, mn;
      if (run < 4) {
        sc = scales[run] & 63;
        mn = scales[run + 4] & 63;
      } else {
        sc = static_cast<uint8_t>((scales[run + 4] & 0xf) | (scales[run - 4] >> 6 << 4));
        mn = static_cast<uint8_t>((scales[run + 4] >> 4) | (scales[run] >> 6 << 4));
      }
      group[Weight::kScales + run * kPanelRows + r] = sc;
      group[Weight::kMins + run * kPanelRows + r] = mn;
    }
    __builtin_memcpy(group + Weight::kD + 2 * r, block, 2);
    __builtin_memcpy(group + Weight::kDMin + 2 * r, block + 2, 2);
  }
};

struct Q6KBlock {
  using Weight = Q6KWeight;
  static constexpr int64_t kBytes = kQ6KBlockBytes, kCols = 256;
  static void repack(const uint8_t* block, int64_t r, uint8_t* group) {
    const uint8_t* ql = block;
    const uint8_t* qh = block + 128;
    for (int64_t run = 0; run < 8; ++run) {
      // Of each half of 128 columns: run 0 and 2 have the low and high parts of ql[0..31], run 1
      // and 3 those of ql[32..63]; qh[0..31] has two bits for each run.
      const int64_t half = run / 4, part = run % 4;
      move_nibbles(ql + 64 * half + 32 * (part % 2), part >= 2, r, group + run * kNibbleRunBytes);
      const auto high = [&](int64_t column) {
        return four_bytes(qh + 32 * half + column) >> (2 * part) & 0x03030303;
      };
      for (int64_t i = 0; i < 2; ++i) {
        const int64_t c = 8 * i;
        const uint32_t bits =
            high(c) | high(16 + c) << 2 | high(c + 4) << 4 | high(16 + c + 4) << 6;
        __builtin_memcpy(group + Weight::kHigh + run * Weight::kHighRunBytes + 4 * r + 64 * i,
                         &bits, 4);
      }
    }
    for (int64_t k = 0; k < 16; ++k) group[Weight::kScales + k * kPanelRows + r] = block[192 + k];
    __builtin_memcpy(group + Weight::kD + 2 * r, block + 208, 2);
  }
};

template <class Block>
void pack_gguf_panel(const void* blocks, int64_t rows, int64_t cols, int64_t panel,
                     void* packed_panel) {
  using Weight = typename Block::Weight;
  const int64_t blocks_of_row = cols / Block::kCols;
  const int64_t group_bytes = Weight::group_bytes(Block::kCols);
  // A row writes to every cache line of a group: few enough groups at a time to stay in a near
  // cache.
  constexpr int64_t kTileBytes = 32 << 10;
  const int64_t most = kTileBytes < group_bytes ? 1 : kTileBytes / group_bytes;
  auto* groups = static_cast<uint8_t*>(packed_panel);
  const int64_t begin = panel * kPanelRows;
  const int64_t count = rows - begin < kPanelRows ? rows - begin : kPanelRows;
  const auto* first = static_cast<const uint8_t*>(blocks) + begin * blocks_of_row * Block::kBytes;
  for (int64_t at = 0; at < blocks_of_row; at += most) {
    const int64_t end = blocks_of_row - at < most ? blocks_of_row : at + most;
    __builtin_memset(groups + at * group_bytes, 0, static_cast<uint64_t>((end - at) * group_bytes));
    for (int64_t r = 0; r < count; ++r) {
      const uint8_t* row = first + r * blocks_of_row * Block::kBytes;
      for (int64_t i = at; i < end; ++i) {
        Block::repack(row + i * Block::kBytes, r, groups + i * group_bytes);
      }
    }
  }
}

}  // namespace
}  // namespace fasttps::cpu
