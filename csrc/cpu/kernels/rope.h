// Included after Vec and element.h.
namespace fasttps::cpu {
namespace {

// See RopeRow.
template <class Vec, class Element>
void rope_row(const RopeRow& row) {
  const auto* x = static_cast<const typename Element::Storage*>(row.x);
  load_row<Vec, Element>(x, row.out, row.head_dim);
  if (row.cos != nullptr && row.interleaved) {
    for (int64_t i = 0; i < row.rotary_dim; i += 2) {
      const float a = row.out[i], b = row.out[i + 1];
      row.out[i] = a * row.cos[i] - b * row.sin[i];
      row.out[i + 1] = b * row.cos[i + 1] + a * row.sin[i + 1];
    }
  } else if (row.cos != nullptr) {
    const int64_t half = row.rotary_dim / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float a = row.out[i], b = row.out[half + i];
      row.out[i] = a * row.cos[i] - b * row.sin[i];
      row.out[half + i] = b * row.cos[half + i] + a * row.sin[half + i];
    }
  }
  if (row.factor != 1.0f) {
    for (int64_t i = 0; i < row.head_dim; ++i) row.out[i] *= row.factor;
  }
}

}  // namespace
}  // namespace fasttps::cpu
