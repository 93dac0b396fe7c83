"""A linear layer over a packed weight."""

from __future__ import annotations

import torch
from torch import Tensor

_packed_linear = torch.ops.fasttps.packed_linear.default


def packed_linear(
    x: Tensor,
    packed: Tensor,
    *,
    format: int,
    rows: int,
    group_size: int = 0,
    int8_activation: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """x W^T + bias, where `packed` holds W [rows, cols].

    Args:
        x: [..., cols] in the format's dtype, or any float dtype where the format is quantised,
            with a dense last dimension.
        packed: uint8 from `pack_weight`, `pack_gguf` or `pack_quants`.
        format: the `PackedFormat` of `packed`.
        rows: of the weight.
        group_size: as it was packed.
        int8_activation: round x to int8, 32 columns at a time: faster where the CPU has byte
            products. Quantised formats only.
        bias: [rows], of x's dtype or float32.

    Returns:
        [..., rows], contiguous, in x's dtype. Sums are float32.

    Raises:
        ValueError: a shape, size, format, stride or alignment is wrong.
        TypeError: a dtype or device is wrong; the weight is not packed.
        RuntimeError: a gradient is asked for.
    """
    return _packed_linear(
        x,
        packed,
        format=format,
        rows=rows,
        group_size=group_size,
        int8_activation=int8_activation,
        bias=bias,
    )
