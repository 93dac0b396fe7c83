#pragma once
#include <cstdint>

#include "limit_table.h"

// Templates of the loops. Word is what one load brings:
//   kBytes, static Word zero(), static Word load(const uint8_t*), Word ^ Word, uint64_t fold(Word).
namespace fasttps::cpu {
namespace {

template <PrefetchHint kHint>
inline void prefetch(const uint8_t* at) {
  if constexpr (kHint == PrefetchHint::kAllLevels) __builtin_prefetch(at, 0, 3);
  if constexpr (kHint == PrefetchHint::kNonTemporal) __builtin_prefetch(at, 0, 0);
}

template <class Word, int kStreams, PrefetchHint kHint>
uint64_t read_loop(const void* data, int64_t bytes, int64_t prefetch_bytes) {
  constexpr int64_t kLine = 64, kStep = 4 * kLine;
  constexpr int kWords = kStep / Word::kBytes;
  constexpr int kSums = kWords < 4 ? kWords : 4;
  const auto* begin = static_cast<const uint8_t*>(data);
  const int64_t stream_bytes = bytes / (kStreams * kStep) * kStep;
  Word sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = Word::zero();
  for (int64_t at = 0; at < stream_bytes; at += kStep) {
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) {
      const uint8_t* from = begin + s * stream_bytes + at;
      if constexpr (kHint != PrefetchHint::kNone) {
#pragma GCC unroll 4
        for (int64_t line = 0; line < kStep; line += kLine) {
          prefetch<kHint>(from + prefetch_bytes + line);
        }
      }
#pragma GCC unroll 32
      for (int i = 0; i < kWords; ++i) {
        sums[i % kSums] = sums[i % kSums] ^ Word::load(from + i * Word::kBytes);
      }
    }
  }
  for (int64_t at = kStreams * stream_bytes; at < bytes; at += Word::kBytes) {
    sums[0] = sums[0] ^ Word::load(begin + at);
  }
  uint64_t folded = 0;
  for (int i = 0; i < kSums; ++i) folded ^= fold(sums[i]);
  return folded;
}

// Keeps the compiler from knowing what a register holds: equal chains would become one.
template <class Register>
inline void hide(Register& x) {
  asm volatile("" : "+v"(x));
}

// Chain: Register; kOperations, of one instruction; static Register start(), factor(); static void
// step(Register& acc, Register x), acc += x . x by the instruction itself, since compilers put
// moves between intrinsics; static uint64_t fold_bits(Register).
template <class Chain, int kChains>
uint64_t peak_loop(int64_t iterations) {
  using Register = typename Chain::Register;
  Register chains[kChains], factor = Chain::factor();
  hide(factor);
#pragma GCC unroll 32
  for (int c = 0; c < kChains; ++c) {
    chains[c] = Chain::start();
    hide(chains[c]);
  }
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 32
    for (int c = 0; c < kChains; ++c) Chain::step(chains[c], factor);
  }
  uint64_t folded = 0;
#pragma GCC unroll 32
  for (int c = 0; c < kChains; ++c) folded ^= Chain::fold_bits(chains[c]);
  return folded;
}

template <class Chain, int kChains>
constexpr PeakLoop peak(const char* instruction, uint32_t required_features) {
  return {instruction, required_features, kChains * Chain::kOperations, peak_loop<Chain, kChains>};
}

template <class Word, int kStreams, PrefetchHint kHint>
constexpr ReadLoop read() {
  return read_loop<Word, kStreams, kHint>;
}

#define FASTTPS_READ_HINTS(Word, streams)                                                       \
  {read<Word, streams, PrefetchHint::kNone>(), read<Word, streams, PrefetchHint::kAllLevels>(), \
   read<Word, streams, PrefetchHint::kNonTemporal>()}
#define FASTTPS_READ_LOOPS(Word)                                                          \
  {FASTTPS_READ_HINTS(Word, 1), FASTTPS_READ_HINTS(Word, 2), FASTTPS_READ_HINTS(Word, 4), \
   FASTTPS_READ_HINTS(Word, 8)}

}  // namespace
}  // namespace fasttps::cpu
