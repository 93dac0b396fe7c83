"""The packed layout of weights, LAYOUT_VERSION 1, in plain PyTorch.

A weight [rows, cols] becomes panels of 16 rows, each walked along cols:

    float32           [ceil(rows / 16)][cols][16]
    bfloat16, float16 [ceil(rows / 16)][ceil(cols / 2)][16][2]    pairs of columns

Rows and columns that are missing at the end are zeros. A gate and an up weight alternate: panel
2p holds rows 16p.. of the gate, panel 2p + 1 the same rows of up. The bytes are those of the
machine (little endian), in one uint8 vector.

A panel of a quantised format is a row of groups of columns; a group has the quants of its columns,
32 columns (a run) at a time, then its scales, each for 16 rows:

    bytes    [8][16 rows][4]: byte [j][row][b] is column 4 j + b
    nibbles  [4][16 rows][4]: byte [j][row][b] is column 4 j + b in its low half, 16 + 4 j + b in
             its high half

    3 int8        bytes; the panel ends with d f32
    4 int4        nibbles of the runs, d f16
    5 int4_min    nibbles of the runs, d f16, m f16
    6 int8_group  bytes, d f16
    7 q4_k        8 runs of nibbles, sc u8 [8], mn u8 [8], d f16, dmin f16
    8 q6_k        8 runs of nibbles (low 4 bits), 8 runs of high bits [2][16 rows][4], sc i8 [16],
                  d f16; byte [i][row][b] of the high bits has, from its lowest bits, those of the
                  columns 8 i + b, 16 + 8 i + b, 8 i + 4 + b, 16 + 8 i + 4 + b
    9 int4_zero   nibbles of the runs, d f16, z u8
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import quantized

PANEL_ROWS = 16
LAYOUT_VERSION = 1
FORMAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # indexed by format
INT8, INT4, INT4_MIN, INT8_GROUP, Q4_K, Q6_K, INT4_ZERO = range(3, 10)
RUN = 32


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


def _panels_of_rows(rows: Tensor) -> Tensor:
    """[rows, groups, ...] as [panels, groups, ..., 16]: one element a row beside another."""
    padded = torch.cat((rows, rows.new_zeros((-rows.size(0) % PANEL_ROWS, *rows.shape[1:]))))
    return padded.unflatten(0, (-1, PANEL_ROWS)).movedim(1, -1)


def bytes_of_runs(q: Tensor) -> Tensor:
    """q uint8 [rows, groups, cols] -> [panels, groups, bytes]."""
    quads = _panels_of_rows(q.unflatten(2, (-1, 4)))  # [panels, groups, quads, 4, 16]
    return quads.transpose(-1, -2).flatten(2)


def nibbles_of_runs(q: Tensor) -> Tensor:
    """q uint8 [rows, groups, cols], all below 16 -> [panels, groups, bytes]."""
    halves = q.unflatten(2, (-1, 2, 16))
    return bytes_of_runs((halves[..., 0, :] | (halves[..., 1, :] << 4)).flatten(2))


def high_bits_of_runs(q: Tensor) -> Tensor:
    """q uint8 [rows, groups, cols], all below 4 -> [panels, groups, bytes]."""
    parts = q.unflatten(2, (-1, 2, 2, 2, 4))  # run, half of 16, i, quad of 8, b
    joined = (
        parts[..., 0, :, 0, :]
        | parts[..., 1, :, 0, :] << 2
        | parts[..., 0, :, 1, :] << 4
        | parts[..., 1, :, 1, :] << 6
    )
    return bytes_of_runs(joined.flatten(2))


def scales_of_rows(scales: Tensor) -> Tensor:
    """scales [rows, groups(, n)] of any dtype -> bytes [panels, groups, bytes]."""
    panels = _panels_of_rows(scales).contiguous()
    return panels.view(torch.uint8).reshape(panels.size(0), panels.size(1), -1)


def _quantized_panels(weight: Tensor, packed_format: int, group_size: int) -> Tensor:
    """weight [rows, cols], rounded, as bytes [panels, bytes_per_panel]."""
    cols = weight.size(1)
    x = weight.float()
    group = group_size or RUN
    if packed_format == INT4_MIN and cols % group:
        x = torch.cat((x, x[:, -1:].expand(-1, -cols % group)), 1)
    x = torch.nn.functional.pad(x, (0, -x.size(1) % group))
    if packed_format == INT8:
        finite = quantized.finite_groups(x)
        q, d = quantized.int8_levels(x, rounded=False)
        q = torch.where(finite.unsqueeze(-1), q, 0.0)
        d = torch.where(finite, d, torch.nan)
        quants = bytes_of_runs((q + 128).to(torch.uint8).unflatten(1, (-1, RUN)))
        scales = scales_of_rows(d.unsqueeze(-1)).flatten(1)
        return torch.cat((quants.flatten(1), scales), 1)
    groups = x.unflatten(1, (-1, group))
    finite = quantized.finite_groups(groups)
    m = None
    if packed_format == INT4:
        q, d = quantized.int4_levels(groups)
        q = q + 8
    elif packed_format == INT4_MIN:
        q, d, m = quantized.int4_min_levels(groups)
    else:
        q, d = quantized.int8_levels(groups, rounded=True)
        q = q + 128
    offset = {INT4: 8.0, INT4_MIN: 0.0, INT8_GROUP: 128.0}[packed_format]
    q = torch.where(finite.unsqueeze(-1), q, offset).to(torch.uint8)
    parts = [bytes_of_runs(q) if packed_format == INT8_GROUP else nibbles_of_runs(q)]
    for scale in (d,) if m is None else (d, m):
        parts.append(scales_of_rows(torch.where(finite, scale, torch.nan).half()))
    return torch.cat(parts, 2).flatten(1)


def _panels(weight: Tensor, packed_format: int, group_size: int) -> Tensor:
    if packed_format >= INT8:
        if weight.numel() == 0:
            return torch.empty(-(-weight.size(0) // PANEL_ROWS), 0, dtype=torch.uint8)
        return _quantized_panels(weight, packed_format, group_size)
    assert weight.dtype == FORMAT_DTYPES[packed_format]
    return _to_panels(weight)


def pack_weight(weight: Tensor, *, format: int, group_size: int = 0) -> Tensor:
    """weight [rows, cols] in the format's dtype, or any where it rounds -> uint8 [bytes]."""
    return _panels(weight, format, group_size).flatten()


def pack_gate_up(gate: Tensor, up: Tensor, *, format: int, group_size: int = 0) -> Tensor:
    """gate and up [intermediate_size, hidden_size] -> uint8 [bytes], panels alternating."""
    panels = [_panels(weight, format, group_size) for weight in (gate, up)]
    return torch.stack(panels, dim=1).flatten()


def _runs_of_bytes(run_bytes: Tensor) -> Tensor:
    """The inverse of bytes_of_runs: [panels, groups, bytes] -> [rows, groups, cols]."""
    quads = run_bytes.unflatten(2, (-1, PANEL_ROWS, 4)).movedim(3, 1)
    return quads.flatten(0, 1).flatten(2)


def _runs_of_nibbles(run_bytes: Tensor) -> Tensor:
    both = _runs_of_bytes(run_bytes).unflatten(2, (-1, 16))
    return torch.stack((both & 15, both >> 4), dim=3).flatten(2)


def _runs_of_high_bits(run_bytes: Tensor) -> Tensor:
    joined = _runs_of_bytes(run_bytes).unflatten(2, (-1, 2, 4))  # run, i, b
    low, high = (
        torch.stack((joined >> shift & 3, joined >> (shift + 4) & 3), dim=4) for shift in (0, 2)
    )
    return torch.stack((low, high), dim=3).flatten(2)


def _rows_of_scales(scale_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """bytes [panels, groups, bytes] -> float32 [rows, groups, n]."""
    values = scale_bytes.contiguous().view(dtype).unflatten(2, (-1, PANEL_ROWS))
    return values.movedim(3, 1).flatten(0, 1).float()


def _unpack_quantized(panels: Tensor, packed_format: int, group_size: int) -> Tensor:
    """bytes [panels, bytes_per_panel] -> float32 [rows padded, cols padded]."""
    if packed_format == INT8:
        quants, scales = panels[:, : -4 * PANEL_ROWS], panels[:, -4 * PANEL_ROWS :]
        q = _runs_of_bytes(quants.unflatten(1, (-1, RUN * PANEL_ROWS))).flatten(1)
        return (q.float() - 128) * _rows_of_scales(scales.unsqueeze(1), torch.float32)[:, 0]
    group = {Q4_K: 256, Q6_K: 256}.get(packed_format, group_size or RUN)
    half = 2 * PANEL_ROWS  # bytes of one f16 scale
    sizes = {
        INT4: (group * 8, half),
        INT4_MIN: (group * 8, half, half),
        INT4_ZERO: (group * 8, half, PANEL_ROWS),
        INT8_GROUP: (group * 16, half),
        Q4_K: (group * 8, 8 * PANEL_ROWS, 8 * PANEL_ROWS, half, half),
        Q6_K: (group * 8, group * 4, 16 * PANEL_ROWS, half),
    }[packed_format]
    quants, *others = panels.unflatten(1, (-1, sum(sizes))).split(sizes, 2)
    if packed_format == INT8_GROUP:
        q = _runs_of_bytes(quants).float() - 128
    else:
        q = _runs_of_nibbles(quants).float()
    if packed_format == INT4_ZERO:
        z = _rows_of_scales(others[1], torch.uint8)
        return (_rows_of_scales(others[0], torch.float16) * (q - z)).flatten(1)
    d = _rows_of_scales(others[-1], torch.float16)
    if packed_format in (INT4, INT8_GROUP):
        return (d * (q - 8 if packed_format == INT4 else q)).flatten(1)
    if packed_format == INT4_MIN:
        return (_rows_of_scales(others[0], torch.float16) * q + d).flatten(1)
    if packed_format == Q4_K:
        sc, mn = (_rows_of_scales(part, torch.uint8).unsqueeze(-1) for part in others[:2])
        d, dmin = (_rows_of_scales(part, torch.float16).unsqueeze(-1) for part in others[2:])
        return (d * sc * q.unflatten(2, (8, 32)) - dmin * mn).flatten(1)
    q = q + 16 * _runs_of_high_bits(others[0]).float()
    sc = _rows_of_scales(others[1], torch.int8).unsqueeze(-1)
    return (d.unsqueeze(-1) * sc * (q - 32).unflatten(2, (16, 16))).flatten(1)


def _unpack_panels(
    panels: Tensor, packed_format: int, rows: int, cols: int, group_size: int
) -> Tensor:
    if rows * cols == 0:
        dtype = torch.float32 if packed_format >= INT8 else FORMAT_DTYPES[packed_format]
        return torch.empty(rows, cols, dtype=dtype)
    if packed_format >= INT8:
        padded = _unpack_quantized(panels, packed_format, group_size)
        return padded[:rows, :cols].contiguous()
    return _from_panels(panels.contiguous().view(FORMAT_DTYPES[packed_format]), rows, cols)


def unpack_weight(
    packed: Tensor, *, format: int, rows: int, cols: int, group_size: int = 0
) -> Tensor:
    """The weight [rows, cols] that pack_weight was given, or float32 of what it was rounded to."""
    panels = -(-rows // PANEL_ROWS)
    of_panel = packed.numel() // max(1, panels)
    return _unpack_panels(packed.view(panels, of_panel), format, rows, cols, group_size)


def unpack_gate_up(
    packed: Tensor, *, format: int, rows: int, cols: int, group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """(gate, up), each [rows, cols] = [intermediate_size, hidden_size], as unpack_weight."""
    panels = -(-rows // PANEL_ROWS)
    halves = packed.view(panels, 2, packed.numel() // max(1, 2 * panels)).unbind(1)
    gate, up = (_unpack_panels(half, format, rows, cols, group_size) for half in halves)
    return gate, up
