"""Rows of a packed weight."""

from __future__ import annotations

import torch
from torch import Tensor

_packed_embedding = torch.ops.fasttps.packed_embedding.default


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
    """Rows `ids` of the weight [rows, cols] in `packed`: an embedding whose weight is packed once.

    Args:
        ids: [...], int64 or int32, 0 <= id < rows.
        packed: uint8 from `pack_weight`, `pack_gguf` or `pack_quants`.
        format: the `PackedFormat` of `packed`.
        rows, cols: of the weight.
        dtype: of the result: float32, bfloat16 or float16.
        group_size: as it was packed.

    Returns:
        [..., cols], contiguous.

    Raises:
        ValueError: an id, a size, the format or the alignment is wrong.
        TypeError: a dtype or device is wrong; the weight is not packed.
    """
    return _packed_embedding(
        ids, packed, format=format, rows=rows, cols=cols, dtype=dtype, group_size=group_size
    )
