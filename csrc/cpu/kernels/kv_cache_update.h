// Included after Vec. Writes of rows in a cache's own type are plain copies and need no kernel.
namespace fasttps::cpu {
namespace {

// See KernelTable::quantize_row.
template <class Vec>
void quantize_row(const float* x, int8_t* q, float* scale, int64_t count) {
  float largest = 0.0f, not_finite = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = __builtin_fabsf(x[i]);
    largest = magnitude > largest ? magnitude : largest;
    not_finite += x[i] * 0.0f;  // NaN once an element is NaN or infinite
  }
  *scale = not_finite == 0.0f ? largest / 127.0f : __builtin_nanf("");
  if (!(*scale > 0.0f)) {
    for (int64_t i = 0; i < count; ++i) q[i] = 0;
    return;
  }
  // A subnormal scale is too coarse to keep x / scale within 127 by itself.
  const Vec most = Vec::set(127.0f), least = Vec::set(-127.0f);
  int64_t i = 0;
  float lanes[Vec::kLanes];
  for (; i < count; i += Vec::kLanes) {
    const int64_t lanes_left = count - i < Vec::kLanes ? count - i : Vec::kLanes;
    const Vec quotient = load_up_to<Vec, F32>(x + i, lanes_left) / Vec::set(*scale);
    rint(max(least, min(most, quotient))).store(lanes);
    for (int64_t lane = 0; lane < lanes_left; ++lane)
      q[i + lane] = static_cast<int8_t>(lanes[lane]);
  }
}

}  // namespace
}  // namespace fasttps::cpu
