#pragma once
#include <cstdint>

// 32 bits, or four bytes: the integer vector of one row.
namespace {

struct OneQuad {
  uint32_t v;

  static OneQuad set(int32_t x) { return {static_cast<uint32_t>(x)}; }
  static OneQuad load(const void* p) {
    OneQuad x;
    __builtin_memcpy(&x.v, p, 4);
    return x;
  }
};

inline OneQuad operator&(OneQuad a, OneQuad b) { return {a.v & b.v}; }
inline OneQuad operator|(OneQuad a, OneQuad b) { return {a.v | b.v}; }
template <int kBits>
inline OneQuad shift_left(OneQuad a) {
  return {a.v << kBits};
}
template <int kBits>
inline OneQuad shift_right(OneQuad a) {
  return {a.v >> kBits};
}

}  // namespace
