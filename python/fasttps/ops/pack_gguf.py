"""Quantised GGUF tensors in the packed layout."""

from __future__ import annotations

import torch
from torch import Tensor

_pack_gguf = torch.ops.fasttps.pack_gguf.default
_pack_gguf_out = torch.ops.fasttps.pack_gguf.out


def pack_gguf(
    blocks: Tensor, *, format: int, rows: int, cols: int, out: Tensor | None = None
) -> Tensor:
    """The blocks of a quantised GGUF tensor in panels; no quant and no scale is changed.

    Args:
        blocks: uint8 [rows, bytes of a row], contiguous.
        format: what the blocks are: `PackedFormat` INT4 for Q4_0, INT4_MIN for Q4_1, INT8_GROUP
            for Q8_0, Q4_K for Q4_K, Q6_K for Q6_K.
        rows, cols: of the weight; cols is a multiple of 32, of 256 for Q4_K and Q6_K.
        out: uint8 [panels of 16 rows, bytes of a panel], where the panels are to be; dense in the
            last dimension, so that it may be every other panel of a larger one.

    Returns:
        `out`, or uint8 [bytes], 64-byte aligned, as `pack_weight` makes them: with group_size 32
        for the first three, 0 for the others.

    Raises:
        ValueError: a shape, a stride or the format is wrong.
        TypeError: `blocks` is not uint8.
    """
    if out is not None:
        _pack_gguf_out(blocks, format=format, rows=rows, cols=cols, out=out)
        return out
    return _pack_gguf(blocks, format=format, rows=rows, cols=cols)
