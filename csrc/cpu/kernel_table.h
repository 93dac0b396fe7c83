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

  float* max;         // [rows], starts at -inf
  float* sum;         // [rows], starts at 0
  float* out;         // [rows, padded_dim], starts at 0
  uint8_t* attended;  // [rows], set to 1 for a row that could see a position
  float* scratch;     // attention_scratch_floats(padded_dim)
};

// f32 elements of AttentionTask::scratch, enough for either kernel.
constexpr int64_t attention_scratch_floats(int64_t padded_dim) {
  return 2 * kMaxQueryRows * padded_dim  // query and output, transposed
         + 2 * kKeyBlock * padded_dim    // keys and values in f32
         + kKeyBlock * kMaxQueryRows     // scores
         + 4 * kMaxQueryRows;            // running state
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

// Columns of a packed weight: those of the weight, rounded up to whole 4-byte runs.

// h[m, i] = act(gate_i . x_m + gate_bias[i]) * (up_i . x_m + up_bias[i]) for panels
// panel_begin <= i / 16 < panel_end of the intermediate dimension.
struct GateUpTask {
  const void* activation;  // [tokens, cols] as `prepare` left it
  int64_t tokens;
  int64_t cols;        // of the packed weight
  const void* packed;  // gate and up panels alternating
  int64_t panel_begin;
  int64_t panel_end;
  const float* gate_bias;  // null or [intermediate rounded up to 16], f32
  const float* up_bias;
  Activation function;
  void* h;  // [tokens, h_stride], of the activation type
  int64_t h_stride;
};

// out[m, i] = w_i . h_m + bias[i] for panels panel_begin <= i / 16 < panel_end.
struct DownTask {
  const void* h;  // [tokens, h_stride], of the activation type, zero past the weight's columns
  int64_t tokens;
  int64_t h_stride;
  int64_t cols;  // of the packed weight
  const void* packed;
  int64_t panel_begin;
  int64_t panel_end;
  const float* bias;  // null or [rows rounded up to 16], f32
  void* out;          // [tokens, rows], of the weight's type
  int64_t rows;
};

// The packed matmuls of one weight type.
struct PackedLinearKernels {
  int64_t activation_bytes;  // of one element of an activation
  // One row of x, of the weight's type, as the dot product wants it; zero past cols.
  void (*prepare)(const void* x, int64_t cols, int64_t cols_padded, void* activation);
  void (*gate_up)(const GateUpTask& task);
  void (*down)(const DownTask& task);
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

  // out[i] = sum over parts of weights[p] * rows[p][i].
  void (*merge_attention)(const float* const* rows, const float* weights, int64_t parts, float* out,
                          int64_t count);

  PackedLinearKernels gate_up_silu_mlp[kFloatTypes];

  // Panel `panel` of a [rows, cols] weight whose rows lie row_stride elements apart; by bytes of an
  // element: [0] four, [1] two. Both directions are pure moves.
  void (*pack_panel[2])(const void* weight, int64_t row_stride, int64_t rows, int64_t cols,
                        int64_t panel, void* packed_panel);
  void (*unpack_panel[2])(const void* packed_panel, int64_t rows, int64_t cols, int64_t panel,
                          void* weight, int64_t row_stride);
};

extern const KernelTable kScalarKernels;
#ifdef FASTTPS_X86
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx512Bf16Kernels;
#endif

}  // namespace fasttps::cpu
