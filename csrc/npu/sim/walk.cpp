#include "walk.h"

#include <algorithm>
#include <cstring>

namespace fasttps::npu::sim {

KnownWalk::KnownWalk(int64_t offset_bytes, const std::vector<Dimension>& dimensions,
                     int64_t unit_bytes, int64_t all_bytes)
    : offset_bytes_(offset_bytes), outer_(dimensions) {
  if (outer_.empty()) {
    run_bytes_ = bytes_ = all_bytes;
  } else {
    run_bytes_ = bytes_ = unit_bytes;
    for (const Dimension& dimension : outer_) bytes_ *= dimension.size;
    // The innermost dimensions whose steps lie side by side are one run.
    while (!outer_.empty() && outer_.back().stride_bytes == run_bytes_) {
      run_bytes_ *= outer_.back().size;
      outer_.pop_back();
    }
  }
  begin_ = end_ = 0;
  if (bytes_ <= 0) {
    bytes_ = 0;
    run_bytes_ = 1;
    return;
  }
  int64_t low = offset_bytes, high = offset_bytes;
  for (const Dimension& dimension : outer_) {
    const int64_t last = (dimension.size - 1) * dimension.stride_bytes;
    (last < 0 ? low : high) += last;
  }
  begin_ = low;
  end_ = high + run_bytes_;
}

int64_t KnownWalk::offset(int64_t index) const {
  int64_t at = offset_bytes_;
  for (size_t i = outer_.size(); i-- > 0;) {
    at += index % outer_[i].size * outer_[i].stride_bytes;
    index /= outer_[i].size;
  }
  return at;
}

void KnownWalk::gather(const std::byte* memory, int64_t at, std::span<std::byte> stream) const {
  std::byte* to = stream.data();
  visit(at, static_cast<int64_t>(stream.size()), [&](int64_t offset, int64_t bytes) {
    std::memcpy(to, memory + offset, static_cast<size_t>(bytes));
    to += bytes;
  });
}

void KnownWalk::scatter(std::span<const std::byte> stream, int64_t at, std::byte* memory) const {
  const std::byte* from = stream.data();
  visit(at, static_cast<int64_t>(stream.size()), [&](int64_t offset, int64_t bytes) {
    std::memcpy(memory + offset, from, static_cast<size_t>(bytes));
    from += bytes;
  });
}

}  // namespace fasttps::npu::sim
