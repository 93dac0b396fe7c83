// Included after Vec and element.h.
namespace fasttps::cpu {
namespace {

// See KernelTable::merge_attention. Paper 004: O = sum_p e^(m_p - m) O_p, the weights precomputed.
template <class Vec>
void merge_attention(const float* const* rows, const float* weights, int64_t parts, float* out,
                     int64_t count) {
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    Vec sum = Vec::set(0.0f);
    for (int64_t p = 0; p < parts; ++p) {
      sum = fmadd(Vec::set(weights[p]), load_up_to<Vec, F32>(rows[p] + i, count - i), sum);
    }
    if (count - i >= Vec::kLanes) {
      sum.store(out + i);
    } else {
      store_partial<Vec, F32>(sum, out + i, count - i);
    }
  }
}

}  // namespace
}  // namespace fasttps::cpu
