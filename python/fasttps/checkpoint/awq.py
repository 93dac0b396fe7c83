"""AWQ's gemm layout, as AutoAWQ writes it.

    qweight  int32 [cols, rows / 8]      a word has 8 rows of a column
    qzeros   int32 [groups, rows / 8]
    scales   [groups, rows]

The quants of a word are, from its lowest bits, those of the rows 0, 2, 4, 6, 1, 3, 5, 7. A folder
states the columns of a group, -1 being all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttps.checkpoint.schemes import Part, Parts, UnsupportedCheckpoint, integer
from fasttps.checkpoint.weights import QuantizedWeight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Awq:
    """The reader of one folder."""

    marker = "qweight"
    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, config: dict[str, Any]) -> None:
        """
        Raises:
            UnsupportedCheckpoint: another layout or another number of bits.
        """
        layout = str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()
        bits = config.get("bits", config.get("w_bit"))
        if layout != "gemm":
            raise UnsupportedCheckpoint(f"is AWQ in the layout {layout}, and only gemm is read")
        if bits != 4:
            raise UnsupportedCheckpoint(f"is AWQ of {bits} bits, and only 4 are read")
        self.group_size = integer(config, "group_size", config.get("q_group_size"))

    def parts(self, name: str, rows: int, cols: int, has: Parts) -> list[Part]:
        groups = -(-cols // self._group(cols))
        return [
            Part("qweight", (torch.int32,), ((cols, rows // 8),)),
            Part("qzeros", (torch.int32,), ((groups, rows // 8),)),
            Part("scales", FLOATS, ((groups, rows),)),
        ]

    def read(self, name: str, rows: int, cols: int, parts: Parts) -> QuantizedWeight:
        return QuantizedWeight(
            4,
            _rows(parts.read("qweight")),
            parts.read("scales").t().contiguous(),
            _rows(parts.read("qzeros")),
            self._group(cols),
        )

    def _group(self, cols: int) -> int:
        return self.group_size if self.group_size > 0 else cols


def _rows(words: Tensor) -> Tensor:
    """[n, rows / 8] words as quants [rows, n].

    Byte 2 h + i of a word has row 4 i + h in its low half and row 4 i + 2 + h in its high half.
    """
    bytes_ = words.contiguous().view(torch.uint8).unflatten(1, (-1, 2, 2)).transpose(2, 3)
    return torch.stack((bytes_ & 15, bytes_ >> 4), 3).flatten(1).t()
