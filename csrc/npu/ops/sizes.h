#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace fasttps::npu {

// Each at least 1, and small enough that products of four do not overflow.
inline void check_sizes(const char* op,
                        std::initializer_list<std::pair<const char*, int64_t>> sizes) {
  constexpr int64_t kMost = int64_t{1} << 24;
  for (const auto& [name, size] : sizes) {
    if (size < 1 || size > kMost) {
      throw std::invalid_argument(std::string(op) + ": wanted a " + name + " of 1 to 2^24, got " +
                                  std::to_string(size));
    }
  }
}

}  // namespace fasttps::npu
