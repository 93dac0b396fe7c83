#include <cstdint>

#include "../loops.h"

namespace fasttps::cpu {
namespace {

struct Word {
  static constexpr int64_t kBytes = 8;
  uint64_t v;
  static Word zero() { return {0}; }
  static Word load(const uint8_t* p) {
    Word word;
    __builtin_memcpy(&word.v, p, sizeof(word.v));
    return word;
  }
  friend Word operator^(Word a, Word b) { return {a.v ^ b.v}; }
  friend uint64_t fold(Word a) { return a.v; }
};

}  // namespace

const LimitTable kScalarLimits = {"scalar", 0, FASTTPS_READ_LOOPS(Word), {}};

}  // namespace fasttps::cpu
