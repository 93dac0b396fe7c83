#pragma once
#include <cstdint>

namespace fasttps::cpu {

// Bytes from one row of many to the next: a whole and odd number of cache lines, so that the same
// columns of all rows do not meet in the same few sets of a cache.
constexpr int64_t spread_row_bytes(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

}  // namespace fasttps::cpu
