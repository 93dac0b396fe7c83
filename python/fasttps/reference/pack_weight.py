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
    split = padded.reshape(padded.size(0) // PANEL_ROWS, PANEL_ROWS, -1, group)
    panels = split.transpose(1, 2).contiguous()
    return panels.view(torch.uint8).reshape(panels.size(0), -1)


def _from_panels(panels: Tensor, dtype: torch.dtype, rows: int, cols: int) -> Tensor:
    """The inverse of _to_panels."""
    group = _column_group(dtype)
    values = panels.contiguous().view(dtype).view(panels.size(0), -1, PANEL_ROWS, group)
    return values.transpose(1, 2).reshape(panels.size(0) * PANEL_ROWS, -1)[:rows, :cols].clone()


def pack_weight(weight: Tensor, *, format: int) -> Tensor:
    """weight [rows, cols] in the format's dtype -> uint8 [bytes]."""
    assert weight.dtype == FORMAT_DTYPES[format]
    return _to_panels(weight).flatten()


def unpack_weight(
    packed: Tensor, *, format: int, rows: int, cols: int, group_size: int = 0
) -> Tensor:
    """The weight [rows, cols] that pack_weight was given, exactly."""
    panels = packed.view(-(-rows // PANEL_ROWS), -1)
    return _from_panels(panels, FORMAT_DTYPES[format], rows, cols)


def pack_gate_up(gate: Tensor, up: Tensor, *, format: int) -> Tensor:
    """gate and up [intermediate_size, hidden_size] -> uint8 [bytes], panels alternating."""
    assert gate.dtype == up.dtype == FORMAT_DTYPES[format]
    return torch.stack((_to_panels(gate), _to_panels(up)), dim=1).flatten()


def unpack_gate_up(
    packed: Tensor, *, format: int, rows: int, cols: int, group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """(gate, up), each [rows, cols] = [intermediate_size, hidden_size], exactly."""
    dtype = FORMAT_DTYPES[format]
    gate, up = packed.view(-(-rows // PANEL_ROWS), 2, -1).unbind(1)
    return _from_panels(gate, dtype, rows, cols), _from_panels(up, dtype, rows, cols)
