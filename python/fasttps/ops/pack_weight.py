"""Weights in the order in which the kernels read them, and back.

Layout, version 1: panels of 16 rows, each walked along cols, so that a thread that takes a range
of panels reads one stream (after the interlaced gate-up weights of FastTPS, section 3.2).

    F32        [ceil(rows / 16)][cols][16]
    BF16, F16  [ceil(rows / 16)][ceil(cols / 2)][16][2]    pairs of columns, as dot products want

Rows and columns that are missing at the end are zeros. A gate and an up weight alternate: panel
2p holds rows 16p.. of the gate, panel 2p + 1 the same rows of up. It depends on neither thread
count nor instruction set. Packing is a permutation: unpacking is exact.
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

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight that is packed and unpacked."""
        return _DTYPES[self]

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


def pack_weight(weight: Tensor, *, format: int) -> Tensor:
    """Pack `weight` [rows, cols] in the format's dtype; its rows are dense, at any distance.

    Returns:
        uint8 [bytes], 64-byte aligned; bytes = ceil(rows / 16) * 16 * cols * itemsize, with cols
        rounded up to an even number for 16-bit formats.

    Raises:
        ValueError: a shape, a stride or the format is wrong.
        TypeError: the dtype is not the format's.
        RuntimeError: a gradient is asked for.
    """
    return _pack_weight(weight, format=format)


def unpack_weight(
    packed: Tensor, *, format: int, rows: int, cols: int, group_size: int = 0
) -> Tensor:
    """The weight [rows, cols] that was packed, bit for bit. group_size: 0 for these formats.

    Raises:
        ValueError: the size of `packed` does not fit format, rows and cols.
        TypeError: `packed` is not uint8.
    """
    return _unpack_weight(packed, format=format, rows=rows, cols=cols, group_size=group_size)


def pack_gate_up(gate: Tensor, up: Tensor, *, format: int) -> Tensor:
    """Pack `gate` and `up` [intermediate_size, hidden_size], panel by panel in turn.

    Rows are dense, at any distance.

    Returns:
        uint8 [bytes], 64-byte aligned; twice the bytes of one packed weight.

    Raises:
        ValueError: the shapes differ, or a stride or the format is wrong.
        TypeError: a dtype is not the format's.
        RuntimeError: a gradient is asked for.
    """
    return _pack_gate_up(gate, up, format=format)


def unpack_gate_up(
    packed: Tensor, *, format: int, rows: int, cols: int, group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """(gate, up), each [rows, cols] = [intermediate_size, hidden_size], bit for bit.

    Raises:
        ValueError: the size of `packed` does not fit format, rows and cols.
        TypeError: `packed` is not uint8.
    """
    return _unpack_gate_up(packed, format=format, rows=rows, cols=cols, group_size=group_size)
