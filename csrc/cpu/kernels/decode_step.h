// Included after Vec, math.h and element.h. What a whole token needs beside the other ops' kernels.
namespace fasttps::cpu {
namespace {

// out = x / sqrt(mean(x^2) + eps) * weight (RMSNorm, arXiv:1910.07467).
template <class Vec>
void rms_norm_row(const float* x, const float* weight, float eps, int64_t count, float* out) {
  constexpr int kSums = 4;
  Vec sums[kSums];
  for (Vec& sum : sums) sum = Vec::set(0.0f);
  int64_t i = 0;
  for (; i + kSums * Vec::kLanes <= count; i += kSums * Vec::kLanes) {
    for (int s = 0; s < kSums; ++s) {
      const Vec v = Vec::load(x + i + s * Vec::kLanes);
      sums[s] = fmadd(v, v, sums[s]);
    }
  }
  for (; i < count; i += Vec::kLanes) {
    const Vec v = load_up_to<Vec, F32>(x + i, count - i);
    sums[0] = fmadd(v, v, sums[0]);
  }
  const float square = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const Vec scale = Vec::set(1.0f / __builtin_sqrtf(square / static_cast<float>(count) + eps));
  for (i = 0; i + Vec::kLanes <= count; i += Vec::kLanes) {
    (Vec::load(x + i) * scale * Vec::load(weight + i)).store(out + i);
  }
  if (i < count) {
    const Vec tail = load_partial<Vec, F32>(x + i, count - i) * scale *
                     load_partial<Vec, F32>(weight + i, count - i);
    store_partial<Vec, F32>(tail, out + i, count - i);
  }
}

// x = factor * x, then softcap * tanh(x / softcap) where softcap > 0.
template <class Vec>
void scale_row(float* x, int64_t count, float factor, float softcap) {
  const Vec scale = Vec::set(softcap > 0.0f ? factor / softcap : factor), cap = Vec::set(softcap);
  const auto scaled = [&](Vec v) { return softcap > 0.0f ? cap * tanh(v * scale) : v * scale; };
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) scaled(Vec::load(x + i)).store(x + i);
  if (i < count) {
    store_partial<Vec, F32>(scaled(load_partial<Vec, F32>(x + i, count - i)), x + i, count - i);
  }
}

// The first index of the largest of count >= 1 values; a NaN is larger than all.
template <class Vec>
int64_t argmax_f32(const float* x, int64_t count) {
  constexpr int64_t kBlock = 1024;
  int64_t best = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    int64_t i = begin;
    Vec largest = Vec::set(x[best]), is_nan = Vec::set(0.0f);
    for (; i + Vec::kLanes <= end; i += Vec::kLanes) {
      const Vec v = Vec::load(x + i);
      largest = max(v, largest);
      is_nan = fmadd(v, Vec::set(0.0f), is_nan);  // NaN also where v is infinite
    }
    const float nan = reduce_add(is_nan);
    if (i == end && nan == nan && !(reduce_max(largest) > x[best])) continue;
    for (i = begin; i < end; ++i) {
      if (x[i] != x[i]) return i;
      if (x[i] > x[best]) best = i;
    }
  }
  return best;
}

}  // namespace
}  // namespace fasttps::cpu
