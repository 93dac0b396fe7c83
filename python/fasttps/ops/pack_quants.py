"""Quants that another program has rounded to, in the packed layout."""

from __future__ import annotations

import torch
from torch import Tensor

_pack_quants = torch.ops.fasttps.pack_quants.default


def pack_quants(
    quants: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    format: int,
    group_size: int = 0,
) -> Tensor:
    """Quants, scales and zero points in panels; none of them is changed.

    Args:
        quants: uint8 [rows, cols] in any strides; below 16 for INT4 and INT4_ZERO. What
            `PackedFormat` subtracts is not subtracted yet: of a signed int4, q + 8.
        scales: float16 [rows, groups]; of INT8 float32 [rows, 1].
        zeros: of INT4_ZERO uint8 [rows, groups], below 128; of the others None.
        format: `PackedFormat`, one of INT8, INT4, INT8_GROUP and INT4_ZERO.
        group_size: columns in a group: 32, 64 or 128 for INT4 and INT4_ZERO, 32 for INT8_GROUP, 0
            for INT8. The last group may be shorter.

    Returns:
        uint8 [bytes], 64-byte aligned, as `pack_weight` makes them.

    Raises:
        ValueError: a shape, a value, the format or the group size is wrong.
        TypeError: a dtype is wrong.
    """
    return _pack_quants(quants, scales, zeros, format=format, group_size=group_size)
