// Included after Vec, element.h and packed_linear.h. How quantised weights lie in a panel of 16
// rows.
//
// Columns go in groups; a group has all quants of its columns, then its scales. Quants of 32
// columns (a run) come as operands of a byte dot product, 16 rows x 4 columns in 64 bytes:
//   bytes    [8][16 rows][4]: byte [j][row][b] is column 4 j + b
//   nibbles  [4][16 rows][4]: byte [j][row][b] is column 4 j + b in its low half, 16 + 4 j + b in
//   its
//            high half
// so that one load of `quad` has columns 4 j... and 16 + 4 j... of a run. Quants are unsigned; each
// format says what is subtracted.
//
//   format      group bytes                                             weight
//   int8        bytes 512; after the last group of a panel d f32 [16]   d (q - 128)
//   int4        nibbles 256 a run, d f16 [16]                           d (q - 8)
//   int4_min    nibbles 256 a run, d f16 [16], m f16 [16]               d q + m
//   int8_group  bytes 512, d f16 [16]                                   d (q - 128)
//   int4_zero   nibbles 256 a run, d f16 [16], z u8 [16], below 128     d (q - z)
//   q4_k        8 runs of nibbles, sc u8 [8][16], mn u8 [8][16],        d sc q - dmin mn
//               d f16 [16], dmin f16 [16]
//   q6_k        8 runs of nibbles (the low 4 bits), 8 runs of high      d sc (q - 32)
//               bits 128, sc i8 [16][16], d f16 [16]; one sc for 16
//               columns. Byte [i][row][b] of a run's high bits holds,
//               from its lowest bits, those of the columns 8 i + b,
//               16 + 8 i + b, 8 i + 4 + b, 16 + 8 i + 4 + b.
namespace fasttps::cpu {
namespace {

inline constexpr int64_t kNibbleRunBytes = kRunCols * kPanelRows / 2;
inline constexpr int64_t kByteRunBytes = kRunCols * kPanelRows;
inline constexpr int64_t kScaleBytes = 2 * kPanelRows;  // one f16 a row

// scale * q + shift is the weight. Sub-block 0 is columns 0-15 of a run, 1 is 16-31.
template <class Vec>
struct RunScales {
  Vec scale[2];
  Vec shift[2];
};

template <class Vec>
inline Vec f16_rows(const uint8_t* p, int64_t lane) {
  return Vec::load_f16(reinterpret_cast<const uint16_t*>(p) + lane);
}
template <class Vec>
inline Vec i8_rows(const uint8_t* p, int64_t lane) {
  return Vec::load_i8(reinterpret_cast<const int8_t*>(p) + lane);
}

struct Bytes {
  static constexpr bool kSmall = false;  // whether two products with an int8 fit into 16 bits
  template <class Int>
  static void quad(const uint8_t* run, int64_t lane, int j, Int& low, Int& high) {
    low = Int::load(run + 64 * j + 4 * lane);
    high = Int::load(run + 64 * (j + 4) + 4 * lane);
  }
};

struct Nibbles {
  static constexpr bool kSmall = true;
  template <class Int>
  static void quad(const uint8_t* run, int64_t lane, int j, Int& low, Int& high) {
    const Int both = Int::load(run + 64 * j + 4 * lane), mask = Int::set(0x0f0f0f0f);
    low = both & mask;
    high = shift_right<4>(both) & mask;
  }
};

struct Int8Weight {
  static constexpr int kOffset = 128;
  static constexpr int kSubBlocks = 1;
  static constexpr bool kHasMin = false;
  static constexpr bool kRowScale = true;
  static constexpr bool kSmall = Bytes::kSmall;
  static constexpr bool kIsNibbles = false;
  static constexpr int64_t group_cols(int64_t /*group_size*/) { return kRunCols; }
  static constexpr int64_t group_bytes(int64_t /*group*/) { return kByteRunBytes; }
  static constexpr int64_t kTailBytes = 4 * kPanelRows;
  template <class Int>
  static void quad(const uint8_t* group, int64_t, int64_t, int64_t lane, int j, Int& a, Int& b) {
    Bytes::quad(group, lane, j, a, b);
  }
  template <class Vec>
  static RunScales<Vec> scales(const uint8_t*, int64_t, int64_t, int64_t) {
    return {{Vec::set(1.0f)}, {Vec::set(-128.0f)}};
  }
};

struct Int4Weight {
  static constexpr int kOffset = 8;
  static constexpr int kSubBlocks = 1;
  static constexpr bool kHasMin = false;
  static constexpr bool kRowScale = false;
  static constexpr bool kSmall = Nibbles::kSmall;
  static constexpr bool kIsNibbles = true;
  static constexpr int64_t kTailBytes = 0;
  static constexpr int64_t group_cols(int64_t group_size) { return group_size; }
  static constexpr int64_t group_bytes(int64_t group) {
    return group * kPanelRows / 2 + kScaleBytes;
  }
  template <class Int>
  static void quad(const uint8_t* group, int64_t, int64_t run, int64_t lane, int j, Int& a,
                   Int& b) {
    Nibbles::quad(group + run * kNibbleRunBytes, lane, j, a, b);
  }
  template <class Vec>
  static RunScales<Vec> scales(const uint8_t* group, int64_t cols, int64_t, int64_t lane) {
    const Vec d = f16_rows<Vec>(group + cols * kPanelRows / 2, lane);
    return {{d}, {d * Vec::set(-8.0f)}};
  }
};

struct Int4MinWeight : Int4Weight {
  static constexpr int kOffset = 0;
  static constexpr bool kHasMin = true;
  static constexpr int64_t group_bytes(int64_t group) {
    return group * kPanelRows / 2 + 2 * kScaleBytes;
  }
  template <class Vec>
  static RunScales<Vec> scales(const uint8_t* group, int64_t cols, int64_t, int64_t lane) {
    const uint8_t* d = group + cols * kPanelRows / 2;
    return {{f16_rows<Vec>(d, lane)}, {f16_rows<Vec>(d + kScaleBytes, lane)}};
  }
};

// d and z have 11 and 7 bits, so that d z and q d - d z are exact.
struct Int4ZeroWeight : Int4Weight {
  static constexpr int kOffset = 0;
  static constexpr bool kHasMin = true;
  static constexpr int64_t group_bytes(int64_t group) {
    return group * kPanelRows / 2 + kScaleBytes + kPanelRows;
  }
  template <class Vec>
  static RunScales<Vec> scales(const uint8_t* group, int64_t cols, int64_t, int64_t lane) {
    const uint8_t* of = group + cols * kPanelRows / 2;
    const Vec d = f16_rows<Vec>(of, lane);
    return {{d}, {-(d * i8_rows<Vec>(of + kScaleBytes, lane))}};
  }
};

struct Int8GroupWeight {
  static constexpr int kOffset = 128;
  static constexpr int kSubBlocks = 1;
  static constexpr bool kHasMin = false;
  static constexpr bool kRowScale = false;
  static constexpr bool kSmall = Bytes::kSmall;
  static constexpr bool kIsNibbles = false;
  static constexpr int64_t kTailBytes = 0;
  static constexpr int64_t group_cols(int64_t /*group_size*/) { return kRunCols; }
  static constexpr int64_t group_bytes(int64_t /*group*/) { return kByteRunBytes + kScaleBytes; }
  template <class Int>
  static void quad(const uint8_t* group, int64_t, int64_t, int64_t lane, int j, Int& a, Int& b) {
    Bytes::quad(group, lane, j, a, b);
  }
  template <class Vec>
  static RunScales<Vec> scales(const uint8_t* group, int64_t, int64_t, int64_t lane) {
    const Vec d = f16_rows<Vec>(group + kByteRunBytes, lane);
    return {{d}, {d * Vec::set(-128.0f)}};
  }
};

struct Q4KWeight {
  static constexpr int kOffset = 0;
  static constexpr int kSubBlocks = 1;
  static constexpr bool kHasMin = true;
  static constexpr bool kRowScale = false;
  static constexpr bool kSmall = Nibbles::kSmall;
  static constexpr bool kIsNibbles = true;
  static constexpr int64_t kTailBytes = 0;
  static constexpr int64_t kScales = 8 * kNibbleRunBytes, kMins = kScales + 8 * kPanelRows;
  static constexpr int64_t kD = kMins + 8 * kPanelRows, kDMin = kD + kScaleBytes;
  static constexpr int64_t group_cols(int64_t /*group_size*/) { return 256; }
  static constexpr int64_t group_bytes(int64_t /*group*/) { return kDMin + kScaleBytes; }
  template <class Int>
  static void quad(const uint8_t* group, int64_t, int64_t run, int64_t lane, int j, Int& a,
                   Int& b) {
    Nibbles::quad(group + run * kNibbleRunBytes, lane, j, a, b);
  }
  template <class Vec>
  static RunScales<Vec> scales(const uint8_t* group, int64_t, int64_t run, int64_t lane) {
    const Vec sc = i8_rows<Vec>(group + kScales + run * kPanelRows, lane);
    const Vec mn = i8_rows<Vec>(group + kMins + run * kPanelRows, lane);
    return {{sc * f16_rows<Vec>(group + kD, lane)}, {-(mn * f16_rows<Vec>(group + kDMin, lane))}};
  }
};

struct Q6KWeight {
  static constexpr int kOffset = 32;
  static constexpr int kSubBlocks = 2;
  static constexpr bool kHasMin = false;
  static constexpr bool kRowScale = false;
  static constexpr bool kSmall = true;
  static constexpr bool kIsNibbles = false;
  static constexpr int64_t kTailBytes = 0;
  static constexpr int64_t kHigh = 8 * kNibbleRunBytes, kHighRunBytes = kNibbleRunBytes / 2;
  static constexpr int64_t kScales = kHigh + 8 * kHighRunBytes;
  static constexpr int64_t kD = kScales + 16 * kPanelRows;
  static constexpr int64_t group_cols(int64_t /*group_size*/) { return 256; }
  static constexpr int64_t group_bytes(int64_t /*group*/) { return kD + kScaleBytes; }
  template <class Int>
  static void quad(const uint8_t* group, int64_t, int64_t run, int64_t lane, int j, Int& a,
                   Int& b) {
    Nibbles::quad(group + run * kNibbleRunBytes, lane, j, a, b);
    const Int bits = Int::load(group + kHigh + run * kHighRunBytes + 64 * (j / 2) + 4 * lane);
    const Int mask = Int::set(0x30303030);
    if (j % 2 == 0) {
      a = a | (shift_left<4>(bits) & mask);
      b = b | (shift_left<2>(bits) & mask);
    } else {
      a = a | (bits & mask);
      b = b | (shift_right<2>(bits) & mask);
    }
  }
  template <class Vec>
  static RunScales<Vec> scales(const uint8_t* group, int64_t, int64_t run, int64_t lane) {
    const Vec d = f16_rows<Vec>(group + kD, lane), offset = Vec::set(-32.0f);
    const uint8_t* sc = group + kScales + 2 * run * kPanelRows;
    const Vec low = d * i8_rows<Vec>(sc, lane), high = d * i8_rows<Vec>(sc + kPanelRows, lane);
    return {{low, high}, {low * offset, high * offset}};
  }
};

// Columns rounded up to whole groups, and the bytes of a panel of so many.
template <class Weight>
constexpr int64_t padded_cols(int64_t cols, int64_t group_size) {
  const int64_t group = Weight::group_cols(group_size);
  return (cols + group - 1) / group * group;
}
template <class Weight>
constexpr int64_t quantized_panel_bytes(int64_t cols, int64_t group_size) {
  const int64_t group = Weight::group_cols(group_size);
  return padded_cols<Weight>(cols, group_size) / group * Weight::group_bytes(group) +
         Weight::kTailBytes;
}

// f32 factors of the rows of an int8 panel.
template <class Weight>
inline const float* row_scales(const void* panel, int64_t cols, int64_t group_size) {
  return reinterpret_cast<const float*>(static_cast<const uint8_t*>(panel) +
                                        quantized_panel_bytes<Weight>(cols, group_size) -
                                        Weight::kTailBytes);
}

}  // namespace
}  // namespace fasttps::cpu
