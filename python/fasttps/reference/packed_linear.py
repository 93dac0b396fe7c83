"""`packed_linear` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .attention import compute_dtype
from .pack_weight import unpack_weight
from .quantized import int8_activation as int8_activation_of


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
    """x W^T + bias; float64 x is computed in float64, others in float32 and rounded once.

    With int8_activation, x is rounded to int8 first.
    """
    dtype = compute_dtype(x.dtype)
    weight = unpack_weight(packed, format=format, rows=rows, cols=x.size(-1), group_size=group_size)
    rows_of_x = int8_activation_of(x) if int8_activation else x
    with torch.autocast(x.device.type, enabled=False):
        out = functional.linear(
            rows_of_x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )
    return out.to(x.dtype)
