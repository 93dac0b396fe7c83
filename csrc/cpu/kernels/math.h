// Included after Vec. Elementary functions of a vector, within 2 ulp of float64 (csrc/tests).
// max(a, b) and min(a, b) return b where either is NaN, so a NaN argument passes through.
namespace fasttps::cpu {
namespace {

inline constexpr float kLog2E = 1.44269504088896341f;

// 2^x = 2^n * 2^r with n = floor(x), r in [0, 1); 2^r by a degree-6 minimax polynomial with
// 2^0 = 1 exactly, relative error 2.0e-9.
template <class Vec>
inline Vec exp2(Vec x) {
  Vec n;
  const Vec r = fraction(x, n);
  Vec p = Vec::set(2.161291505e-04f);
  p = fmadd(p, r, Vec::set(1.246784641e-03f));
  p = fmadd(p, r, Vec::set(9.675451571e-03f));
  p = fmadd(p, r, Vec::set(5.548528062e-02f));
  p = fmadd(p, r, Vec::set(2.402293056e-01f));
  p = fmadd(p, r, Vec::set(6.931470444e-01f));
  p = fmadd(p, r, Vec::set(1.0f));
  return times_power_of_two(p, n);
}

// e^x = 2^n * e^r, r = x - n ln 2 with ln 2 in two parts; e^r by a degree-6 minimax polynomial.
template <class Vec>
inline Vec exp(Vec x) {
  x = min(Vec::set(90.0f), max(Vec::set(-105.0f), x));
  const Vec n = rint(x * Vec::set(kLog2E));
  Vec r = fmadd(n, Vec::set(-0.693359375f), x);
  r = fmadd(n, Vec::set(2.12194440e-4f), r);
  Vec p = Vec::set(1.395048574e-03f);
  p = fmadd(p, r, Vec::set(8.368887939e-03f));
  p = fmadd(p, r, Vec::set(4.166620597e-02f));
  p = fmadd(p, r, Vec::set(1.666651815e-01f));
  p = fmadd(p, r, Vec::set(5.000000000e-01f));
  p = fmadd(p, r * r, r) + Vec::set(1.0f);
  return times_power_of_two(p, n);
}

// Odd polynomial below 0.625 (Cephes tanhf), 1 - 2 / (e^2|x| + 1) above.
template <class Vec>
inline Vec tanh(Vec x) {
  const Vec magnitude = abs(x);
  const Vec z = x * x;
  Vec p = Vec::set(-5.70498872745e-3f);
  p = fmadd(p, z, Vec::set(2.06390887954e-2f));
  p = fmadd(p, z, Vec::set(-5.37397155531e-2f));
  p = fmadd(p, z, Vec::set(1.33314422036e-1f));
  p = fmadd(p, z, Vec::set(-3.33332819422e-1f));
  const Vec small = fmadd(p * z, x, x);
  const Vec large = Vec::set(1.0f) - Vec::set(2.0f) / (exp(magnitude + magnitude) + Vec::set(1.0f));
  return select_less(magnitude, Vec::set(0.625f), small, copy_sign(large, x));
}

// x P(x^2) below 0.875; 1 - exp(-g(|x|)) above, g = -ln erfc; both minimax. erf(4) rounds to 1.
template <class Vec>
inline Vec erf(Vec x) {
  const Vec magnitude = min(Vec::set(4.0f), abs(x));
  const Vec z = x * x;
  Vec p = Vec::set(8.675389836e-05f);
  p = fmadd(p, z, Vec::set(-8.211103268e-04f));
  p = fmadd(p, z, Vec::set(5.206747446e-03f));
  p = fmadd(p, z, Vec::set(-2.686158381e-02f));
  p = fmadd(p, z, Vec::set(1.128373295e-01f));
  p = fmadd(p, z, Vec::set(-3.761263490e-01f));
  p = fmadd(p, z, Vec::set(1.128379226e+00f));
  Vec g = Vec::set(2.055429832e-05f);
  g = fmadd(g, magnitude, Vec::set(-4.282286100e-04f));
  g = fmadd(g, magnitude, Vec::set(4.140968900e-03f));
  g = fmadd(g, magnitude, Vec::set(-2.504054084e-02f));
  g = fmadd(g, magnitude, Vec::set(1.081587598e-01f));
  g = fmadd(g, magnitude, Vec::set(6.334564686e-01f));
  g = fmadd(g, magnitude, Vec::set(1.129461169e+00f));
  g = fmadd(g, magnitude, Vec::set(-1.635876979e-04f));
  const Vec large = Vec::set(1.0f) - exp(-g);
  return select_less(abs(x), Vec::set(0.875f), p * x, copy_sign(large, x));
}

template <class Vec, Vec (*kFunction)(Vec)>
void map_f32(const float* x, float* y, int64_t count) {
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) kFunction(Vec::load(x + i)).store(y + i);
  for (; i < count; ++i) {
    float lanes[Vec::kLanes];
    kFunction(Vec::set(x[i])).store(lanes);
    y[i] = lanes[0];
  }
}

}  // namespace
}  // namespace fasttps::cpu
