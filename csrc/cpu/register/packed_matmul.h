#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../../ops/pack_weight.h"
#include "../dispatch.h"
#include "../panel_split.h"
#include "../spread_rows.h"

namespace fasttps::cpu {

// run(begin, end) over panels [0, panels), one contiguous range a thread. A weight is packed and
// read by the same split, so its pages lie near the thread that reads them.
template <class Run>
void for_panel_ranges(int64_t panels, int64_t panel_bytes, const Run& run) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t parts = panel_parts(panels, panel_bytes, threads);
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    run(panel_range(panels, begin, parts).begin, panel_range(panels, end - 1, parts).end);
  });
}

// run(begin, end) over panels [0, panels) in pieces that threads take as they come: for many tokens
// arithmetic is what limits, and a thread that is held up leaves its share to the others.
template <class Run>
void for_panel_pieces(int64_t panels, int64_t panel_bytes, int64_t tokens, const Run& run) {
  constexpr int64_t kFewTokens = 8, kPiecesOfThread = 8;
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  if (tokens <= kFewTokens || threads == 1) return for_panel_ranges(panels, panel_bytes, run);
  const int64_t pieces = threads * kPiecesOfThread;
  const int64_t each = (panels + 2 * pieces - 1) / (2 * pieces) * 2;  // pairs: kernels take two
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (;;) {
      const int64_t begin = next.fetch_add(each, std::memory_order_relaxed);
      if (begin >= panels) return;
      run(begin, std::min(begin + each, panels));
    }
  });
}

// Tokens whose activations are held at once: parts of about the same size, since each reads all
// weights, and of whole register tiles (12 tokens in most kernels).
constexpr int64_t tokens_at_once(int64_t tokens) {
  constexpr int64_t kMost = 264, kTile = 12;
  const int64_t parts = (tokens + kMost - 1) / kMost;
  return std::min(tokens, (tokens + parts * kTile - 1) / (parts * kTile) * kTile);
}

// `bytes` of memory that is not touched and begins with a cache line.
class CacheLines {
 public:
  explicit CacheLines(int64_t bytes)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes + 63))) {}
  std::byte* data() const {
    return memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64) % 64;
  }

 private:
  std::unique_ptr<std::byte[]> memory_;
};

// Memory for a packed weight in huge pages where the system has them; not yet touched.
at::Tensor empty_packed_in_huge_pages(const at::Tensor& like, const PackedShape& shape);

// A bias in f32, zero up to whole panels; empty if there is none.
std::vector<float> padded_bias(const std::optional<at::Tensor>& bias, int64_t size);

inline const float* data_or_null(const std::vector<float>& v) {
  return v.empty() ? nullptr : v.data();
}

// Memory for the activations of some tokens, and the tokens in it.
class Activations {
 public:
  // cols_padded: columns of the packed weight that they meet.
  Activations(ActivationKind kind, int64_t tokens, int64_t cols, int64_t cols_padded);

  // x: `tokens` rows of `cols`, row_stride elements apart.
  void prepare(const void* x, ElementType type, int64_t row_stride, int64_t tokens);

  const void* data() const { return memory_.data(); }
  int64_t row_bytes() const { return row_bytes_; }

 private:
  ActivationKind kind_;
  int64_t cols_, cols_padded_, row_bytes_;
  CacheLines memory_;
};

}  // namespace fasttps::cpu
