"""Weights in the order in which the kernels read them, and back.

Layout, version 1: panels of 16 rows, each walked along cols, so that a thread that takes a range
of panels reads one stream (after the interlaced gate-up weights of FastTPS, section 3.2).

    F32        [ceil(rows / 16)][cols][16]
    BF16, F16  [ceil(rows / 16)][ceil(cols / 2)][16][2]    pairs of columns, as dot products want

Rows and columns that are missing at the end add nothing. A gate and an up weight alternate: panel
2p holds rows 16p.. of the gate, panel 2p + 1 the same rows of up. It depends on neither thread
count nor instruction set. Packing in these formats is a permutation: unpacking is exact.

The others round. A weight w is made of an unsigned q and scales of its row and group of columns:

    INT8        d (q - 128)        8 bits; d float32, of the whole row
    INT4        d (q - 8)          4 bits, groups of 32, 64 or 128; d float16      (GGUF: Q4_0)
    INT4_MIN    d q + m            4 bits, groups of 32, 64 or 128; d, m float16   (Q4_1)
    INT8_GROUP  d (q - 128)        8 bits, groups of 32; d float16                 (Q8_0)
    Q4_K        d sc q - dmin mn   4 bits, groups of 256; sc, mn of 32 columns     (Q4_K)
    Q6_K        d sc (q - 32)      6 bits, groups of 256; sc of 16 columns         (Q6_K)
    INT4_ZERO   d (q - z)          4 bits, groups of 32, 64 or 128; d float16, z a byte (AWQ)

`fasttps.reference.pack_weight` draws their bytes.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

LAYOUT_VERSION = 1

_pack_weight = torch.ops.fasttps.pack_weight.default
_unpack_weight = torch.ops.fasttps.unpack_weight.default
_pack_gate_up = torch.ops.fasttps.pack_gate_up.default
_unpack_gate_up = torch.ops.fasttps.unpack_gate_up.default


class PackedFormat(IntEnum):
    """What a packed weight holds; the number that the ops take as `format`."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    INT4 = 4
    INT4_MIN = 5
    INT8_GROUP = 6
    Q4_K = 7
    Q6_K = 8
    INT4_ZERO = 9

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what `unpack_weight` returns; float32 for the quantised formats."""
        return _DTYPES.get(self, torch.float32)

    @property
    def is_quantized(self) -> bool:
        """Whether packing rounds."""
        return self not in _DTYPES

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The values of `group_size` that the ops take; (0,) where there is no choice."""
        if self in (PackedFormat.INT4, PackedFormat.INT4_MIN, PackedFormat.INT4_ZERO):
            return (32, 64, 128)
        return (32,) if self is PackedFormat.INT8_GROUP else (0,)

    @classmethod
    def of(cls, dtype: torch.dtype) -> PackedFormat:
        """The format that holds a weight of `dtype` exactly.

        Raises:
            TypeError: there is none.
        """
        for packed_format, held in _DTYPES.items():
            if held == dtype:
                return packed_format
        names = ", ".join(str(held) for held in _DTYPES.values())
        raise TypeError(f"PackedFormat.of: dtype wanted one of {names}, got {dtype}")


_DTYPES = {
    PackedFormat.F32: torch.float32,
    PackedFormat.BF16: torch.bfloat16,
    PackedFormat.F16: torch.float16,
}


def pack_weight(weight: Tensor, *, format: int, group_size: int = 0) -> Tensor:
    """Pack `weight` [rows, cols]; its rows are dense, at any distance.

    Args:
        weight: of the format's dtype, or any float dtype for formats that round.
        format: `PackedFormat`, F32 to INT8_GROUP; the others come from `pack_gguf` and
            `pack_quants` alone.
        group_size: columns that share their scales: 32, 64 or 128 for INT4 and INT4_MIN, 32 for
            INT8_GROUP, else 0. Scales are those of the least squared error found in a search. A
            group (for INT8 a row) that holds NaN or infinity becomes NaN.

    Returns:
        uint8 [bytes], 64-byte aligned.

    Raises:
        ValueError: a shape, a stride, the format or the group size is wrong.
        TypeError: the dtype is not the format's.
        RuntimeError: a gradient is asked for.
    """
    return _pack_weight(weight, format=format, group_size=group_size)


def unpack_weight(
    packed: Tensor, *, format: int, rows: int, cols: int, group_size: int = 0
) -> Tensor:
    """The weight [rows, cols] that was packed, bit for bit, or float32 of what was rounded.

    Raises:
        ValueError: the size of `packed` does not fit format, rows, cols and group_size.
        TypeError: `packed` is not uint8.
    """
    return _unpack_weight(packed, format=format, rows=rows, cols=cols, group_size=group_size)


def pack_gate_up(gate: Tensor, up: Tensor, *, format: int, group_size: int = 0) -> Tensor:
    """Pack `gate` and `up` [intermediate_size, hidden_size], panel by panel in turn.

    Rows are dense, at any distance. Arguments as `pack_weight` has them.

    Returns:
        uint8 [bytes], 64-byte aligned; twice the bytes of one packed weight.

    Raises:
        ValueError: the shapes differ, or a stride, the format or the group size is wrong.
        TypeError: a dtype is not the format's.
        RuntimeError: a gradient is asked for.
    """
    return _pack_gate_up(gate, up, format=format, group_size=group_size)


def unpack_gate_up(
    packed: Tensor, *, format: int, rows: int, cols: int, group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """(gate, up), each [rows, cols] = [intermediate_size, hidden_size], as `unpack_weight`.

    Raises:
        ValueError: the size of `packed` does not fit format, rows, cols and group_size.
        TypeError: `packed` is not uint8.
    """
    return _unpack_gate_up(packed, format=format, rows=rows, cols=cols, group_size=group_size)
