// Included after Vec and element.h. One token as a dot product wants it (KernelTable::prepare).
namespace fasttps::cpu {
namespace {

template <class Vec, class Element>
void prepare_f32(const void* x, int64_t cols, int64_t cols_padded, void* activation) {
  auto* to = static_cast<float*>(activation);
  load_row<Vec, Element>(x, to, cols);
  for (int64_t i = cols; i < cols_padded; ++i) to[i] = 0.0f;
}

template <class Vec, class Element>
void prepare_bf16(const void* x, int64_t cols, int64_t cols_padded, void* activation) {
  const auto* from = static_cast<const typename Element::Storage*>(x);
  auto* to = static_cast<uint16_t*>(activation);
  int64_t i = 0;
  for (; i + Vec::kLanes <= cols; i += Vec::kLanes) {
    Element::template load<Vec>(from + i).store_bf16(to + i);
  }
  if (i < cols) {
    store_partial<Vec, Bf16>(load_partial<Vec, Element>(from + i, cols - i), to + i, cols - i);
  }
  for (i = cols; i < cols_padded; ++i) to[i] = 0;
}

}  // namespace
}  // namespace fasttps::cpu
