#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifndef __AIE_ARCH__
#define __AIE_ARCH__ 21
#endif

// Code for each kind of core has names of its own, so that a library may hold them all.
#if __AIE_ARCH__ == 20
#define AIE_HOST_CORE aie2
#elif defined(AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16)
#define AIE_HOST_CORE aie2p_bfp16
#else
#define AIE_HOST_CORE aie2p
#endif

#define AIE_PREPARE_FOR_PIPELINING
#define AIE_LOOP_RANGE(...)

namespace aie {

// The core's numbers for the modes.
enum class rounding_mode : unsigned {
  floor = 0,
  ceil = 1,
  negative_inf = 8,  // half down
  positive_inf = 9,  // half up
  symmetric_inf = 10,
  symmetric_zero = 11,
  conv_even = 12,
  conv_odd = 13,
};
enum class saturation_mode : unsigned { none = 0, saturate = 1, symmetric = 3 };

inline thread_local rounding_mode current_rounding = rounding_mode::floor;
inline thread_local saturation_mode current_saturation = saturation_mode::none;

inline rounding_mode get_rounding() { return current_rounding; }
inline void set_rounding(rounding_mode mode) { current_rounding = mode; }
inline rounding_mode swap_rounding(rounding_mode mode) {
  const rounding_mode old = current_rounding;
  current_rounding = mode;
  return old;
}
inline void set_saturation(saturation_mode mode) { current_saturation = mode; }

inline double round_by_mode(double x) {
  const double below = std::floor(x);
  const bool half = x - below == 0.5;
  switch (current_rounding) {
    case rounding_mode::floor:
      return below;
    case rounding_mode::ceil:
      return std::ceil(x);
    case rounding_mode::positive_inf:
      return std::floor(x + 0.5);
    case rounding_mode::negative_inf:
      return std::ceil(x - 0.5);
    case rounding_mode::symmetric_inf:
      return x < 0 ? std::ceil(x - 0.5) : std::floor(x + 0.5);
    case rounding_mode::symmetric_zero:
      return x < 0 ? std::floor(x + 0.5) : std::ceil(x - 0.5);
    case rounding_mode::conv_even:
    case rounding_mode::conv_odd:
      break;
  }
  if (!half) return std::floor(x + 0.5);
  const bool odd = std::fmod(below, 2) != 0;
  return odd == (current_rounding == rounding_mode::conv_even) ? below + 1 : below;
}

inline uint16_t bfloat16_bits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  if (current_rounding == rounding_mode::conv_even)
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  if (magnitude == 0x7f800000u) return static_cast<uint16_t>(bits >> 16);
  const double value = magnitude / 65536.0;  // in units of the last kept bit
  const double rounded = round_by_mode(bits >> 31 ? -value : value);
  return static_cast<uint16_t>(static_cast<uint32_t>(std::fabs(rounded)) | (bits >> 31 << 15));
}

}  // namespace aie

struct bfloat16 {
  uint16_t bits;

  bfloat16() = default;
  bfloat16(float x) : bits(aie::bfloat16_bits(x)) {}  // NOLINT(google-explicit-constructor)
  operator float() const {                            // NOLINT(google-explicit-constructor)
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};
using int8 = int8_t;
using int16 = int16_t;
using int32 = int32_t;
using uint8 = uint8_t;

struct accfloat {};
struct acc32 {};
struct acc64 {};

namespace aie::inline AIE_HOST_CORE {

// An accumulator's lane as a kernel gets it: rounded by the mode, saturated by the mode.
template <class T>
T narrow(float x, int) {
  return static_cast<T>(x);
}
template <class T>
T narrow(int64_t x, int shift) {
  double y = round_by_mode(std::ldexp(static_cast<double>(x), -shift));
  if (current_saturation != saturation_mode::none) {
    const double top = static_cast<double>(std::numeric_limits<T>::max());
    const double bottom = current_saturation == saturation_mode::symmetric
                              ? -top
                              : static_cast<double>(std::numeric_limits<T>::lowest());
    y = y > top ? top : y < bottom ? bottom : y;
  }
  return static_cast<T>(static_cast<int64_t>(y));
}

template <class Tag>
struct lane {
  using type = int64_t;
};
template <>
struct lane<accfloat> {
  using type = float;
};
template <>
struct lane<acc32> {
  using type = int32_t;
};
template <class T>
using accumulator_of =
    std::conditional_t<std::is_same_v<T, bfloat16> || std::is_same_v<T, float>, accfloat,
                       std::conditional_t<sizeof(T) == 4, acc64, acc32>>;

}  // namespace aie::inline AIE_HOST_CORE
