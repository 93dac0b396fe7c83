"""The packed layout of weights, LAYOUT_VERSION 1, in plain PyTorch.

A weight [rows, cols] becomes panels of 16 rows, each walked along cols:

    float32           [ceil(rows / 16)][cols][16]
    bfloat16, float16 [ceil(rows / 16)][ceil(cols / 2)][16][2]    pairs of columns

Rows and columns that are missing at the end are zeros. A gate and an up weight alternate: panel
2p holds rows 16p.. of the gate, panel 2p + 1 the same rows of up. The bytes are those of the
machine (little endian), in one uint8 vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL_ROWS = 16
LAYOUT_VERSION = 1
FORMAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # indexed by format


def _column_group(dtype: torch.dtype) -> int:
    """Columns that lie beside one another in memory: as many as 4 bytes hold."""
    return 4 // dtype.itemsize


def _to_panels(weight: Tensor) -> Tensor:
    """weight [rows, cols] as bytes [panels, bytes_per_panel]."""
    group = _column_group(weight.dtype)
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -cols % group, 0, -rows % PANEL_ROWS))
    split = padded.unflatten(1, (-1, group)).unflatten(0, (-1, PANEL_ROWS))
    panels = split.transpose(1, 2).contiguous()
    return panels.view(torch.uint8).flatten(1)


def _from_panels(panels: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of _to_panels, of elements [panels, elements_per_panel] or all in a row."""
    group = _column_group(panels.dtype)
    split = panels.reshape(-(-rows // PANEL_ROWS), -(-cols // group), PANEL_ROWS, group)
    return split.transpose(1, 2).flatten(0, 1).flatten(1)[:rows, :cols].contiguous()


def pack_weight(weight: Tensor, *, format: int) -> Tensor:
    """weight [rows, cols] in the format's dtype -> uint8 [bytes]."""
    assert weight.dtype == FORMAT_DTYPES[format]
    return _to_panels(weight).flatten()


def unpack_weight(
    packed: Tensor, *, format: int, rows: int, cols: int, group_size: int = 0
) -> Tensor:
    """The weight [rows, cols] that pack_weight was given, exactly."""
    return _from_panels(packed.view(FORMAT_DTYPES[format]), rows, cols)


def pack_gate_up(gate: Tensor, up: Tensor, *, format: int) -> Tensor:
    """gate and up [intermediate_size, hidden_size] -> uint8 [bytes], panels alternating."""
    assert gate.dtype == up.dtype == FORMAT_DTYPES[format]
    return torch.stack((_to_panels(gate), _to_panels(up)), dim=1).flatten()


def unpack_gate_up(
    packed: Tensor, *, format: int, rows: int, cols: int, group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """(gate, up), each [rows, cols] = [intermediate_size, hidden_size], exactly."""
    elements = packed.view(FORMAT_DTYPES[format])
    panels = -(-rows // PANEL_ROWS)
    gate, up = elements.view(panels, 2, elements.numel() // max(1, 2 * panels)).unbind(1)
    return _from_panels(gate, rows, cols), _from_panels(up, rows, cols)
