"""Quants and scales of another program in the packed layout, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .pack_weight import INT4, INT4_ZERO, INT8, RUN, bytes_of_runs, nibbles_of_runs, scales_of_rows


def pack_quants(
    quants: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    format: int,
    group_size: int = 0,
) -> Tensor:
    """quants uint8 [rows, cols], scales [rows, groups], zeros uint8 -> uint8 [bytes]."""
    if quants.numel() == 0:
        return quants.new_empty(0)
    group = group_size or RUN
    padded = torch.nn.functional.pad(quants, (0, -quants.size(1) % group))
    groups = padded.unflatten(1, (-1, group))
    runs = nibbles_of_runs(groups) if format in (INT4, INT4_ZERO) else bytes_of_runs(groups)
    if format == INT8:
        return torch.cat((runs.flatten(1), scales_of_rows(scales).flatten(1)), 1).flatten()
    parts = [runs, *(scales_of_rows(part) for part in (scales, zeros) if part is not None)]
    return torch.cat(parts, 2).flatten()
