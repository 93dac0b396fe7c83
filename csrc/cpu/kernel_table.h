#pragma once
#include <cstdint>

// What an instruction set offers: one table of function pointers a set, filled by kernels/all.h.
// Torch-free; kernels neither allocate nor start threads nor throw.
namespace fasttps::cpu {

enum CpuFeature : uint32_t {
  kAvx2Bit = 1u << 0,
  kFmaBit = 1u << 1,
  kF16cBit = 1u << 2,
  kAvx512fBit = 1u << 3,
  kAvx512bwBit = 1u << 4,
  kAvx512dqBit = 1u << 5,
  kAvx512vlBit = 1u << 6,
  kAvx512Bf16Bit = 1u << 7,
  kAvx512VnniBit = 1u << 8,
  kAvx512Fp16Bit = 1u << 9,
  kAmxTileBit = 1u << 10,
  kAmxBf16Bit = 1u << 11,
  kAmxInt8Bit = 1u << 12,
};

// Index of the per-type rows below. kInt8 is a cache type only.
enum ElementType : int { kF32 = 0, kBf16 = 1, kF16 = 2, kInt8 = 3 };
inline constexpr int kFloatTypes = 3;
inline constexpr int kCacheTypes = 4;

// Output rows of a panel of a packed weight.
inline constexpr int64_t kPanelRows = 16;

// Positions that the attention kernels handle at once: one bit each in a uint64_t.
inline constexpr int64_t kKeyBlock = 64;

// Query rows that one attention task may hold.
inline constexpr int64_t kMaxQueryRows = 64;

// Up to kMaxQueryRows query rows that share a KV head, against the positions [begin, end) of its
// cache. Adds to the running softmax state in base 2 (Milakov & Gimelshein 2018,
// arXiv:1805.02867): after a task, softmax . V = out / sum, and log2 of the sum of
// 2^score is max + log2(sum).
struct AttentionTask {
  const float* query;  // [rows, padded_dim], rotated, scaled (below), zero past head_dim
  int64_t rows;
  int64_t head_dim;
  int64_t padded_dim;  // head_dim rounded up to a multiple of 16

  // Position p lies at k + (p - slot_shift) * k_stride elements; v alike.
  const void* k;
  const void* v;
  int64_t k_stride;
  int64_t v_stride;
  int64_t slot_shift;
  const float* k_scale;  // int8 caches: one factor a slot, k_scale_stride floats apart
  const float* v_scale;
  int64_t k_scale_stride;
  int64_t v_scale_stride;
  int64_t begin;
  int64_t end;

  // Row r may see the positions first[r] <= p <= last[r] for which the byte
  // mask[r][(p - slot_shift) * mask_stride] is not 0. mask may be null.
  const int64_t* first;
  const int64_t* last;
  const uint8_t* const* mask;
  int64_t mask_stride;

  // Scores in base 2: query . k, or softcap_log2 * tanh(query . k) where softcap_log2 > 0. So query
  // comes times scale * log2(e), or times scale / softcap with softcap_log2 = softcap * log2(e).
  float softcap_log2;

  // > 0: query / bf16_factor may be rounded to bf16, since activations are bf16, and weights too;
  // or both to numbers of 16 bits, as decode does with int8 caches. 0: they may not.
  float bf16_factor;

  float* max;         // [rows], starts at -inf
  float* sum;         // [rows], starts at 0
  float* out;         // [rows, padded_dim], starts at 0
  uint8_t* attended;  // [rows], set to 1 for a row that could see a position
  float* scratch;     // attention_scratch_floats(padded_dim, rows)
};

// f32 elements of AttentionTask::scratch for tasks of up to `rows` rows: for rope_attention_decode,
// for either of the causal_prefill kernels, for all.
constexpr int64_t decode_scratch_floats(int64_t padded_dim, int64_t rows = kMaxQueryRows) {
  const int64_t rounded = (rows + 3) / 4 * 4;
  return 2 * rounded * (padded_dim + 16)  // query and output in chunks
         + 17 * rounded                   // sums, factors of scores
         + 10 * kKeyBlock + 16;           // weights of four rows, twice, scales, alignment
}
constexpr int64_t prefill_scratch_floats(int64_t padded_dim, int64_t rows = kMaxQueryRows) {
  const int64_t columns = (rows + 15) / 16 * 16;
  return 2 * columns * padded_dim       // query and output, transposed
         + 2 * kKeyBlock * padded_dim   // keys and values, converted
         + 3 * kKeyBlock / 2 * columns  // scores, weights as bf16
         + 3 * columns + 16;            // running state, alignment
}
constexpr int64_t attention_scratch_floats(int64_t padded_dim, int64_t rows = kMaxQueryRows) {
  const int64_t decode = decode_scratch_floats(padded_dim, rows);
  const int64_t prefill = prefill_scratch_floats(padded_dim, rows);
  return decode > prefill ? decode : prefill;
}

// RoPE of one row: out[j] = x[j] * cos[j] + rotate(x)[j] * sin[j] for j < rotary_dim, x[j] beyond.
// rotate(x) = (-x2, x1) on halves, or (-x[2i+1], x[2i]) on pairs if interleaved (RoFormer,
// arXiv:2104.09864). Everything is then multiplied by factor. cos null: no rotation.
struct RopeRow {
  const void* x;  // [head_dim], of the type of the table's row
  const float* cos;
  const float* sin;
  int64_t rotary_dim;
  int64_t head_dim;
  bool interleaved;
  float factor;
  float* out;  // [head_dim]
};

enum Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// Index of the per-format rows below: PackedFormat of csrc/ops/packed_format.h.
inline constexpr int kPackedFormats = 10;
inline constexpr int kPackableFormats = 7;  // 0...: what a weight can be rounded to
inline constexpr int kFirstGgufFormat = 4;  // those of GGUF blocks
inline constexpr int kGgufFormats = 5;
inline constexpr int kQuantFormats =
    4;  // that pack_quants makes: int8, int4, int8_group, int4_zero

// How the activations of a token lie in memory for the dot product of a packed weight.
enum ActivationKind : int { kActF32 = 0, kActBf16 = 1, kActInt8 = 2 };
inline constexpr int kActivationKinds = 3;

// Bytes of a token's activations; cols are those of the packed weight.
constexpr int64_t activation_row_bytes(ActivationKind kind, int64_t cols) {
  if (kind == kActInt8) return (cols + 31) / 32 * 64;  // with the scale and sums of each 32 columns
  return kind == kActF32 ? 4 * cols : 2 * cols;
}

// out[m][i] = w_i . x_m + bias[i] for the rows panel_begin <= i / 16 < panel_end of a packed weight
// [rows, cols]. Reentrant: threads take disjoint ranges of panels.
struct LinearTask {
  const void* activation;    // tokens as `prepare` left them,
  int64_t activation_bytes;  // this far apart
  int64_t tokens;
  int64_t cols;  // of the packed weight: those of the weight, rounded up as its format says
  int64_t group_size;
  const void* packed;  // panel 0
  int64_t panel_begin;
  int64_t panel_end;
  const float* bias;  // null or [rows rounded up to 16]
  bool accumulate;    // out += ...; out is then f32
  void* out;
  ElementType out_type;  // not kInt8
  int64_t out_stride;    // elements between tokens
  int64_t rows;          // of out; what a panel has beyond is not written
};

// out[m][i] = act(gate_i . x_m + gate_bias[i]) * (up_i . x_m + up_bias[i]) for pairs of panels
// panel_begin <= i / 16 < panel_end: panel 2p holds gate, 2p + 1 up. Fields as above.
struct GateUpTask {
  const void* activation;
  int64_t activation_bytes;
  int64_t tokens;
  int64_t cols;
  int64_t group_size;
  const void* packed;
  int64_t panel_begin;
  int64_t panel_end;
  const float* gate_bias;
  const float* up_bias;
  Activation function;
  void* out;
  ElementType out_type;
  int64_t out_stride;
  int64_t rows;
};

// Panel `panel` of a [rows, cols] weight whose rows lie row_stride elements apart.
struct PackPanelTask {
  const void* weight;
  ElementType type;  // of the weight; formats 0-2 take their own alone
  int64_t row_stride;
  int64_t rows;
  int64_t cols;
  int64_t group_size;
  int64_t panel;
  void* packed_panel;
};

// Panel `panel` of the unsigned quants of a [rows, cols] weight, element [row][col] at
// row * row_stride + col * col_stride.
struct PackQuantsTask {
  const uint8_t* quants;
  int64_t row_stride;
  int64_t col_stride;
  int64_t rows;
  int64_t cols;
  int64_t group_size;
  const void* scales;    // [rows, groups] f16, or [rows] f32 where the format has a scale a row
  const uint8_t* zeros;  // [rows, groups] where the format has zeros
  int64_t panel;
  void* packed_panel;
};

// The products of one packed format with one kind of activation.
struct PackedLinearKernels {
  ActivationKind kind;
  void (*linear)(const LinearTask& task);
  void (*gate_up)(const GateUpTask& task);
};

// Of one format: [0] with float activations, [1] with int8 ones; where a format takes only floats,
// both are the same.
struct PackedLinearRow {
  PackedLinearKernels by_activation[2];
  constexpr const PackedLinearKernels& operator[](int64_t int8_activation) const {
    return by_activation[int8_activation];
  }
};

// One row per instruction set; a new one is one new file in isa/. No field may be null.
struct KernelTable {
  const char* isa;             // the name that FASTTPS_ISA takes
  uint32_t required_features;  // CpuFeature bits

  void (*exp_f32)(const float* x, float* y, int64_t count);
  void (*exp2_f32)(const float* x, float* y, int64_t count);
  void (*tanh_f32)(const float* x, float* y, int64_t count);
  void (*erf_f32)(const float* x, float* y, int64_t count);

  // By ElementType. store_row: out[i] = round(x[i] * factor).
  void (*load_row[kFloatTypes])(const void* x, float* out, int64_t count);
  void (*store_row[kFloatTypes])(const float* x, float factor, void* out, int64_t count);
  void (*rope_row[kFloatTypes])(const RopeRow& row);
  // scale = max |x| / 127, q = round(x / scale), halves to even. A row with a NaN or an infinity
  // gets scale NaN, so that it stays visible.
  void (*quantize_row)(const float* x, int8_t* q, float* scale, int64_t count);

  // By ElementType of the cache.
  void (*rope_attention_decode[kCacheTypes])(const AttentionTask& task);
  void (*causal_prefill[kCacheTypes])(const AttentionTask& task);
  // With vdpbf16ps where the table, the cache type and AttentionTask::bf16_factor allow it.
  void (*causal_prefill_bf16[kCacheTypes])(const AttentionTask& task);

  // out[i] = sum over parts of weights[p] * rows[p][i].
  void (*merge_attention)(const float* const* rows, const float* weights, int64_t parts, float* out,
                          int64_t count);

  // out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i].
  void (*rms_norm_row)(const float* x, const float* weight, float eps, int64_t count, float* out);
  // x[i] = factor * x[i], and softcap * tanh(x[i] / softcap) of that where softcap > 0.
  void (*scale_row)(float* x, int64_t count, float factor, float softcap);
  // Index of the first of the largest of count >= 1 values; NaN is larger than all.
  int64_t (*argmax_f32)(const float* x, int64_t count);

  PackedLinearRow packed_linear[kPackedFormats];
  // bf16 weights by f32 FMA, for CPUs where that is faster than vdpbf16ps; packed_linear[kBf16] of
  // a table that has no vdpbf16ps.
  PackedLinearRow packed_linear_bf16_fma;
  // One token x [cols] as activations of a kind, zero up to cols_padded. By ElementType of x.
  void (*prepare[kActivationKinds][kFloatTypes])(const void* x, int64_t cols, int64_t cols_padded,
                                                 void* activation);
  // Row `row` of a packed weight in f32, out [cols].
  void (*unpack_row[kPackedFormats])(const void* packed, int64_t cols, int64_t group_size,
                                     int64_t row, float* out);

  // By format. A pure move for formats 0-2.
  void (*pack_panel[kPackableFormats])(const PackPanelTask& task);
  // By format - kFirstGgufFormat: panel `panel` of the GGUF blocks of a [rows, cols] weight.
  void (*pack_gguf_panel[kGgufFormats])(const void* blocks, int64_t rows, int64_t cols,
                                        int64_t panel, void* packed_panel);
  // By the place of a format in kQuantFormats' comment. A pure move.
  void (*pack_quants_panel[kQuantFormats])(const PackQuantsTask& task);
  // The inverse of pack_panel for formats 0-2, by bytes of an element: [0] four, [1] two.
  void (*unpack_panel[2])(const void* packed_panel, int64_t rows, int64_t cols, int64_t panel,
                          void* weight, int64_t row_stride);
};

extern const KernelTable kScalarKernels;
#ifdef FASTTPS_X86
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx512Bf16Kernels;
extern const KernelTable kAvx512AmxKernels;
#endif

}  // namespace fasttps::cpu
