#include "pack_gguf.h"

#include <torch/library.h>

#include "check.h"

namespace fasttps {
namespace {

constexpr const char* kOp = "pack_gguf";

struct GgufBlock {
  const char* name;
  int64_t cols, bytes;
};

// By format - 4.
constexpr GgufBlock kBlocks[] = {
    {"Q4_0", 32, 18}, {"Q4_1", 32, 20}, {"Q8_0", 32, 34}, {"Q4_K", 256, 144}, {"Q6_K", 256, 210},
};

at::Tensor pack_gguf_meta(const at::Tensor& blocks, int64_t format, int64_t rows, int64_t cols) {
  return empty_packed(blocks, check_pack_gguf(blocks, format, rows, cols));
}

void pack_gguf_out_meta(const at::Tensor& blocks, int64_t format, int64_t rows, int64_t cols,
                        at::Tensor& out) {
  check_pack_gguf_out(blocks, format, rows, cols, out);
}

}  // namespace

PackedShape check_pack_gguf(const at::Tensor& blocks, int64_t format, int64_t rows, int64_t cols) {
  const PackedFormat packed_format = check_format(kOp, "format", format);
  TORCH_CHECK_VALUE(packed_format >= PackedFormat::kInt4 && packed_format <= PackedFormat::kQ6K,
                    kOp,
                    ": format must be one of GGUF blocks: 4 (Q4_0), 5 (Q4_1), 6 (Q8_0), 7 (Q4_K) "
                    "or 8 (Q6_K), got ",
                    format);
  const GgufBlock& block = kBlocks[format - static_cast<int64_t>(PackedFormat::kInt4)];
  constexpr int64_t kMost = int64_t{1} << 40;
  TORCH_CHECK_VALUE(rows >= 0 && rows <= kMost, kOp, ": rows must be 0 to 2^40, got ", rows);
  TORCH_CHECK_VALUE(cols >= 0 && cols <= kMost / std::max<int64_t>(rows, 1), kOp,
                    ": cols must be at least 0, and rows * cols at most 2^40, got ", cols);
  TORCH_CHECK_VALUE(cols % block.cols == 0, kOp, ": cols must be a multiple of ", block.cols,
                    " for ", block.name, ", got ", cols);
  check_dtype(kOp, "blocks", blocks, {at::kByte});
  check_sizes(kOp, "blocks", blocks, "[rows, bytes of a row]",
              {rows, cols / block.cols * block.bytes});
  TORCH_CHECK_VALUE(blocks.is_contiguous(), kOp, ": blocks must be contiguous, got strides ",
                    blocks.strides());
  const int64_t group_size = block.cols == 32 ? 32 : 0;
  return {packed_format, rows, cols, group_size, packed_panels(rows)};
}

PackedShape check_pack_gguf_out(const at::Tensor& blocks, int64_t format, int64_t rows,
                                int64_t cols, const at::Tensor& out) {
  const PackedShape shape = check_pack_gguf(blocks, format, rows, cols);
  check_dtype(kOp, "out", out, {at::kByte});
  check_sizes(kOp, "out", out, "[panels, bytes of a panel]",
              {shape.panels, packed_panel_bytes(shape.format, cols, shape.group_size)});
  TORCH_CHECK_VALUE(out.stride(1) == 1 && out.stride(0) >= out.size(1), kOp,
                    ": out must be dense in a panel, and its panels apart, got strides ",
                    out.strides());
  return shape;
}

TORCH_LIBRARY_IMPL(fasttps, Meta, m) {
  m.impl("pack_gguf", pack_gguf_meta);
  m.impl("pack_gguf.out", pack_gguf_out_meta);
}

}  // namespace fasttps
