"""Quants of 4 or 8 bits out of the 32-bit words that checkpoints have them in.

A word has its first quant in its lowest bits, and its bytes lie in memory from the lowest on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quants_of(words: Tensor, bits: int) -> Tensor:
    """int32 words [..., n] as uint8 quants [..., n, 32 / bits]."""
    parts = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    if bits == 8:
        return parts
    return torch.stack((parts & 15, parts >> 4), -1).flatten(-2)


def along_rows(words: Tensor, bits: int) -> Tensor:
    """[rows, n] words, each of some columns of a row, as quants [rows, columns]."""
    return quants_of(words, bits).flatten(1)


def along_cols(words: Tensor, bits: int) -> Tensor:
    """[n, cols] words, each of some rows of a column, as quants [rows, cols]."""
    return quants_of(words, bits).transpose(1, 2).flatten(0, 1)
