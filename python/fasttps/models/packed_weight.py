"""What lies in a packed buffer, and which weights it stands for. Knows the ops alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttps import ops

PANEL_ROWS = 16  # of a packed weight


class Slot(NamedTuple):
    """A buffer, and the submodules whose weights it holds: one, or gate and up in turn.

    "" is the module itself. `halves`: gate and up are the halves of the rows of the one.
    """

    buffer: str
    names: tuple[str, ...]
    halves: bool = False

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """What is packed in turn, of a tensor for each name."""
        return list(tensors[0].chunk(2)) if self.halves else tensors

    def join(self, parts: list[Tensor]) -> list[Tensor]:
        """The tensors for the names, of those parts."""
        return [torch.cat(parts)] if self.halves else parts


@dataclass(frozen=True)
class Packed:
    """What a packed buffer holds.

    Attributes:
        rows, cols: of what is packed in turn, each: of half a weight where a slot has halves.
        exact: unpacking gives the weights back bit for bit.
        int8_activation: whether the op is to round activations to int8.
        inference: the weights were made in inference mode, and only such data can replace theirs.
        columns: int64 [cols], the order in which the columns of the weight lie; None: their own.
    """

    format: ops.PackedFormat
    group_size: int
    rows: int
    cols: int
    exact: bool
    int8_activation: bool
    inference: bool
    columns: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The format, and the size of its groups if it has any."""
        group = f" in groups of {self.group_size}" if self.group_size else ""
        order = "" if self.columns is None else ", columns reordered"
        return f"{self.format.name}{group}{order}"


class PackedTensor(NamedTuple):
    """A packed weight as the ops take it.

    `bias` is that of the linear, or (gate's, up's) where the two are packed in one; `columns` the
    order in which the activations have to come, None: their own.
    """

    packed: Tensor
    format: ops.PackedFormat
    group_size: int
    rows: int
    cols: int
    int8_activation: bool
    bias: Any
    columns: Tensor | None = None

    def slice(self, first: int, rows: int) -> PackedTensor | str:
        """Rows [first, first + rows) as a weight of their own, or why they are none."""
        panels = -(-self.rows // PANEL_ROWS)
        panel_bytes = self.packed.numel() // panels
        if first % PANEL_ROWS or (rows % PANEL_ROWS and first + rows < self.rows):
            return f"rows {first} to {first + rows} are not whole panels of {PANEL_ROWS}"
        if panel_bytes % 64:
            return f"panels of {panel_bytes} bytes are not aligned"
        begin, end = first // PANEL_ROWS, -(-(first + rows) // PANEL_ROWS)
        packed = self.packed[begin * panel_bytes : end * panel_bytes]
        bias = None if self.bias is None else self.bias[first : first + rows]
        return self._replace(packed=packed, rows=rows, bias=bias)
