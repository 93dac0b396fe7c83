#pragma once
// gcc 12 takes the undefined value inside its own AVX-512 intrinsics for a use (gcc bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

#include "../../kernel_table.h"
#include "../loops.h"

namespace fasttps::cpu {
namespace {

inline uint64_t fold_512(__m512i a) {
  alignas(64) uint64_t words[8];
  _mm512_store_si512(words, a);
  uint64_t folded = 0;
  for (uint64_t word : words) folded ^= word;
  return folded;
}

struct Word {
  static constexpr int64_t kBytes = 64;
  __m512i v;
  static Word zero() { return {_mm512_setzero_si512()}; }
  static Word load(const uint8_t* p) { return {_mm512_load_si512(p)}; }
  friend Word operator^(Word a, Word b) { return {_mm512_xor_si512(a.v, b.v)}; }
  friend uint64_t fold(Word a) { return fold_512(a.v); }
};

}  // namespace
}  // namespace fasttps::cpu
