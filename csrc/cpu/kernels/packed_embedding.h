// Included after element.h and pack_weight.h. One row of a packed weight, as an embedding reads it.
namespace fasttps::cpu {
namespace {

template <class Element>
float load_one(typename Element::Storage x);
template <>
inline float load_one<F32>(float x) {
  return x;
}
template <>
inline float load_one<Bf16>(uint16_t x) {
  return bf16_to_f32(x);
}
template <>
inline float load_one<F16>(uint16_t x) {
  return f16_to_f32(x);
}

// See KernelTable::unpack_row.
template <class Element>
void unpack_row(const void* packed, int64_t cols, int64_t /*group_size*/, int64_t row, float* out) {
  using Storage = typename Element::Storage;
  constexpr int64_t run = kRun<Storage>;
  const int64_t cols_padded = (cols + run - 1) / run * run;
  const auto* from = static_cast<const Storage*>(packed) +
                     row / kPanelRows * kPanelRows * cols_padded + row % kPanelRows * run;
  for (int64_t col = 0; col < cols; ++col) {
    out[col] = load_one<Element>(from[col / run * run * kPanelRows + col % run]);
  }
}

// The vector of one row, as far as the scales of a format need it.
struct OneRow {
  float v;

  static OneRow set(float x) { return {x}; }
  static OneRow load_f16(const uint16_t* p) { return {f16_to_f32(*p)}; }
  static OneRow load_i8(const int8_t* p) { return {static_cast<float>(*p)}; }
};
inline OneRow operator*(OneRow a, OneRow b) { return {a.v * b.v}; }
inline OneRow operator-(OneRow a) { return {-a.v}; }

template <class Weight>
void unpack_quantized_row(const void* packed, int64_t cols, int64_t group_size, int64_t row,
                          float* out) {
  const int64_t lane = row % kPanelRows;
  const int64_t group_cols = Weight::group_cols(group_size);
  const uint8_t* panel = static_cast<const uint8_t*>(packed) +
                         row / kPanelRows * quantized_panel_bytes<Weight>(cols, group_size);
  float d = 1.0f;
  if constexpr (Weight::kRowScale) d = row_scales<Weight>(panel, cols, group_size)[lane];
  for (int64_t col = 0; col < cols; col += kRunCols) {
    const int64_t run = col % group_cols / kRunCols;
    const uint8_t* group = panel + col / group_cols * Weight::group_bytes(group_cols);
    const auto scales = Weight::template scales<OneRow>(group, group_cols, run, lane);
    for (int j = 0; j < 4; ++j) {
      OneQuad quads[2];
      Weight::quad(group, group_cols, run, lane, j, quads[0], quads[1]);
      for (int half = 0; half < 2; ++half) {
        const int k = half < Weight::kSubBlocks ? half : 0;
        for (int64_t b = 0; b < 4; ++b) {
          const int64_t at = col + 16 * half + 4 * j + b;
          const float q = static_cast<float>((quads[half].v >> (8 * b)) & 0xff);
          if (at < cols) out[at] = (q * scales.scale[k].v + scales.shift[k].v) * d;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fasttps::cpu
