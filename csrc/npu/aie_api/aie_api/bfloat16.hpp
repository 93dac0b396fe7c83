#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// bfloat16 and the rounding mode of a core, as kernels see them: part of what AMD's AIE API gives a
// core, for the host. Names and meanings are the API's; the code is not.

namespace aie {

// How a float becomes narrower. A core starts with floor; kernels set conv_even and restore.
enum class rounding_mode { floor, conv_even, positive_inf, symmetric_inf };

inline thread_local rounding_mode current_rounding = rounding_mode::floor;

inline rounding_mode get_rounding() { return current_rounding; }
inline void set_rounding(rounding_mode mode) { current_rounding = mode; }
inline rounding_mode swap_rounding(rounding_mode mode) {
  const rounding_mode old = current_rounding;
  current_rounding = mode;
  return old;
}

namespace detail {

// The upper half of a float's bits; NaN stays NaN, what is too large becomes infinite.
inline uint16_t to_bf16_even(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : rounded);
}

// Towards minus infinity: cut off, and one further where that made a negative number larger.
inline uint16_t to_bf16_floor(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const bool further = (bits >> 31) != 0 && (bits & 0xffff) != 0 && !nan;
  return static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : (bits >> 16) + (further ? 1 : 0));
}

// Halves go up, or away from zero.
inline uint16_t to_bf16_half(float x, bool away_from_zero) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  const bool negative = (bits >> 31) != 0;
  const uint32_t half = negative && !away_from_zero ? 0x7fff : 0x8000;
  return static_cast<uint16_t>((bits + half) >> 16);
}

inline uint16_t to_bf16(float x, rounding_mode mode) {
  switch (mode) {
    case rounding_mode::floor:
      return to_bf16_floor(x);
    case rounding_mode::conv_even:
      return to_bf16_even(x);
    default:
      return to_bf16_half(x, mode == rounding_mode::symmetric_inf);
  }
}

}  // namespace detail
}  // namespace aie

struct bfloat16 {
  uint16_t bits = 0;

  bfloat16() = default;
  // A constant of a kernel, rounded to nearest whatever the mode.
  bfloat16(float x) : bits(aie::detail::to_bf16_even(x)) {}  // NOLINT(google-explicit-constructor)
  operator float() const {                                   // NOLINT(google-explicit-constructor)
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};
static_assert(sizeof(bfloat16) == 2);
