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

}  // namespace
}  // namespace fasttps::cpu
