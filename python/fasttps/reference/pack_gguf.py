"""GGUF blocks in the packed layout, in plain PyTorch.

Blocks as in llama.cpp's ggml-common.h, d and m being float16:

    Q4_0  32 columns: d, qs[16]; low halves are columns 0-15, high ones 16-31
    Q4_1  32: d, m, qs[16]
    Q8_0  32: d, q[32] signed
    Q4_K  256: d, dmin, scales[12] of 6 bits (sc and mn of 8 sub-blocks), qs[128]
    Q6_K  256: ql[128], qh[64], scales[16] signed, d
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pack_weight import (
    INT4,
    INT4_MIN,
    INT8_GROUP,
    Q4_K,
    Q6_K,
    bytes_of_runs,
    high_bits_of_runs,
    nibbles_of_runs,
    scales_of_rows,
)

_BLOCK_BYTES = {INT4: 18, INT4_MIN: 20, INT8_GROUP: 34, Q4_K: 144, Q6_K: 210}


def _nibbles(q: Tensor) -> Tensor:
    """Low halves, then high halves, of the last dimension."""
    return torch.cat((q & 15, q >> 4), -1)


def _f16(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16)


def _pack_q4_k(blocks: Tensor) -> list[Tensor]:
    d, dmin, scales, qs = blocks.split((2, 2, 12, 128), -1)
    low, middle, high = scales.split(4, -1)
    sc = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    mn = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1)
    q = _nibbles(qs.unflatten(-1, (4, 32))).flatten(-2)
    parts = [scales_of_rows(part) for part in (sc, mn, _f16(d), _f16(dmin))]
    return [nibbles_of_runs(q), *parts]


def _pack_q6_k(blocks: Tensor) -> list[Tensor]:
    ql, qh, sc, d = blocks.split((128, 64, 16, 2), -1)
    low = _nibbles(ql.unflatten(-1, (2, 64))).flatten(-2)
    quarters = qh.unflatten(-1, (2, 32))
    high = torch.cat([quarters >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    scales = [scales_of_rows(sc.contiguous().view(torch.int8)), scales_of_rows(_f16(d))]
    return [nibbles_of_runs(low), high_bits_of_runs(high), *scales]


def pack_gguf(
    blocks: Tensor, *, format: int, rows: int, cols: int, out: Tensor | None = None
) -> Tensor:
    """blocks uint8 [rows, bytes of a row] -> uint8 [bytes], as pack_weight.

    out: uint8 [panels, bytes of a panel], where they are to be instead.
    """
    if out is not None:
        packed = pack_gguf(blocks, format=format, rows=rows, cols=cols)
        return out.copy_(packed.view(out.shape))
    if blocks.numel() == 0:
        return blocks.new_empty(0)
    block = blocks.unflatten(1, (-1, _BLOCK_BYTES[format]))
    if format == Q4_K:
        parts = _pack_q4_k(block)
    elif format == Q6_K:
        parts = _pack_q6_k(block)
    elif format == INT8_GROUP:
        parts = [bytes_of_runs(block[..., 2:] ^ 0x80), scales_of_rows(_f16(block[..., :2]))]
    else:
        scales = 2 if format == INT4 else 4
        q = nibbles_of_runs(_nibbles(block[..., scales:]))
        parts = [q, *(scales_of_rows(_f16(block[..., i : i + 2])) for i in range(0, scales, 2))]
    return torch.cat(parts, 2).flatten()
