"""GPTQ's layout, as auto-gptq and gptqmodel write it.

    qweight  int32 [cols / n, rows]       a word has n = 32 / bits columns of a row
    qzeros   int32 [groups, rows / n]     a word has n rows of a group
    scales   [groups, rows]
    g_idx    int32 [cols]                 the group of each column; none: in their own order

In the layout v1 of `checkpoint_format` "gptq" 1 has been subtracted from each zero point, as from
a whole word: what a 0 borrowed comes back by adding to the word. With act-order (`desc_act`) the
groups are of columns that lie anywhere.
"""

from __future__ import annotations

from typing import Any

import torch

from fasttps.checkpoint.awq import FLOATS
from fasttps.checkpoint.schemes import (
    BrokenCheckpoint,
    Part,
    Parts,
    UnsupportedCheckpoint,
    in_groups,
)
from fasttps.checkpoint.weights import QuantizedWeight
from fasttps.checkpoint.words import along_cols, along_rows

_ONES = {4: 0x11111111, 8: 0x01010101}


class Gptq:
    """The reader of one folder."""

    marker = "qweight"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: dict[str, Any]) -> None:
        """
        Raises:
            UnsupportedCheckpoint: another layout or another number of bits.
        """
        layout = str(config.get("checkpoint_format") or "gptq").lower()
        if config.get("is_marlin_format"):
            layout = "marlin"
        if layout not in ("gptq", "gptq_v2"):
            raise UnsupportedCheckpoint(
                f"is GPTQ in the layout {layout}, and only gptq and gptq_v2 are read"
            )
        words = config.get("pack_dtype") or "int32"
        if words != "int32":
            raise UnsupportedCheckpoint(f"is GPTQ in words of {words}, and only int32 are read")
        bits = config.get("bits")
        if bits not in _ONES:
            raise UnsupportedCheckpoint(f"is GPTQ of {bits} bits, and only 4 and 8 are read")
        self._is_v1 = layout == "gptq"

    def parts(self, name: str, rows: int, cols: int, has: Parts) -> list[Part]:
        bits = self._bits(name, cols, has)
        return [
            Part("qweight", (torch.int32,), ((cols * bits // 32, rows),)),
            Part("qzeros", (torch.int32,), ((-1, rows * bits // 32),)),
            Part("scales", FLOATS, ((-1, rows),)),
            Part("g_idx", (torch.int32, torch.int64), ((cols,),), needed=False),
        ]

    def read(self, name: str, rows: int, cols: int, parts: Parts) -> QuantizedWeight:
        bits = self._bits(name, cols, parts)
        words, scales = parts.read("qzeros"), parts.read("scales").t().contiguous()
        groups = scales.shape[1]
        if groups < 1 or words.shape[0] != groups:
            raise BrokenCheckpoint(
                f"has {words.shape[0]} zero points a row of {name}, not {groups}"
            )
        if self._is_v1:
            words = words + _ONES[bits]
        quants = along_cols(parts.read("qweight"), bits).t()
        zeros = along_rows(words, bits).t()
        weight = QuantizedWeight(bits, quants, scales, zeros, -(-cols // groups))
        return in_groups(name, weight, parts.read("g_idx") if parts.has("g_idx") else None)

    def _bits(self, name: str, cols: int, parts: Parts) -> int:
        """Those of one weight, which a config may give as an exception."""
        words = parts.shape("qweight")[0] if len(parts.shape("qweight")) == 2 else 0
        bits = 32 * words // cols if cols else 0
        if bits not in _ONES or 32 * words != bits * cols:
            raise UnsupportedCheckpoint(f"has {words} words for the {cols} columns of {name}")
        return bits
