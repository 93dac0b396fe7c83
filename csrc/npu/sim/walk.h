#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fasttps::npu::sim {

// A walk with its numbers known: outermost dimension first, strides in bytes. Bytes come in the
// order in which a DMA meets them.
class KnownWalk {
 public:
  struct Dimension {
    int64_t size;
    int64_t stride_bytes;
  };
  // No dimensions: `all_bytes` in order.
  KnownWalk(int64_t offset_bytes, const std::vector<Dimension>& dimensions, int64_t unit_bytes,
            int64_t all_bytes);

  int64_t bytes() const { return bytes_; }
  // The first byte and the one past the last that it touches; both 0 where it touches none.
  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }

  // The bytes from `at` to `at + bytes` of the walk, as runs that are contiguous in memory.
  template <class Run>
  void visit(int64_t at, int64_t bytes, const Run& run) const {
    while (bytes > 0) {
      const int64_t within = at % run_bytes_;
      const int64_t count = run_bytes_ - within < bytes ? run_bytes_ - within : bytes;
      run(offset(at / run_bytes_) + within, count);
      at += count;
      bytes -= count;
    }
  }
  // memory -> stream, stream -> memory.
  void gather(const std::byte* memory, int64_t at, std::span<std::byte> stream) const;
  void scatter(std::span<const std::byte> stream, int64_t at, std::byte* memory) const;

 private:
  // Where run number `index` begins.
  int64_t offset(int64_t index) const;

  int64_t offset_bytes_;
  std::vector<Dimension> outer_;  // without those that a run covers
  int64_t run_bytes_;
  int64_t bytes_;
  int64_t begin_;
  int64_t end_;
};

}  // namespace fasttps::npu::sim
