"""`packed_embedding` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .pack_weight import unpack_weight


def packed_embedding(
    ids: Tensor,
    packed: Tensor,
    *,
    format: int,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    group_size: int = 0,
) -> Tensor:
    """Rows `ids` of the weight [rows, cols] in `packed`, in `dtype`."""
    weight = unpack_weight(packed, format=format, rows=rows, cols=cols, group_size=group_size)
    return functional.embedding(ids, weight).to(dtype)
