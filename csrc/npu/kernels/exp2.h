#pragma once
// 2^x for floats without an instruction for it, 16 at once: 2^round(x) times a polynomial of what
// is left in [-1/2, 1/2], Taylor's up to the sixth power, whose error there is below 2^-24. Below
// -126 it is 0, above 127 infinite.
inline aie::vector<float, 16> exp2_polynomial(const aie::vector<float, 16>& x) {
  const auto low = aie::broadcast<float, 16>(-127.0f), high = aie::broadcast<float, 16>(128.0f);
  // max first: NaN, which every comparison denies, goes through both.
  const aie::vector<float, 16> within = aie::min(aie::max(x, low), high);
  const aie::vector<int32_t, 16> whole = aie::to_fixed(within);
  const aie::vector<float, 16> rest = aie::sub(within, aie::to_float(whole));
  constexpr float kTaylor[] = {1.540353e-4f,  1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                               2.4022651e-1f, 6.9314718e-1f, 1.0f};
  aie::vector<float, 16> sum = aie::broadcast<float, 16>(kTaylor[0]);
  for (int i = 1; i < 7; ++i) {
    aie::accum<accfloat, 16> next(aie::broadcast<float, 16>(kTaylor[i]));
    sum = aie::mac(next, sum, rest).to_vector<float>();
  }
  // The exponent's bits of 2^whole: 0 for -127, infinity's for 128.
  const auto bias = aie::broadcast<int32_t, 16>(127);
  const aie::vector<float, 16> power =
      aie::upshift(aie::add(whole, bias), 23).template cast_to<float>();
  return aie::mul(sum, power).to_vector<float>();
}
