"""Quantised weights for tests: what there is, and one of each as the twin packs it."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttps import ops, reference
from tests.support.attention import randn

Format = ops.PackedFormat

# What pack_weight rounds to: (format, group size).
ROUNDED = [
    (packed_format, group_size)
    for packed_format in (Format.INT8, Format.INT4, Format.INT4_MIN, Format.INT8_GROUP)
    for group_size in packed_format.group_sizes
]
# All that the kernels multiply with.
ZERO = [(Format.INT4_ZERO, 32), (Format.INT4_ZERO, 128)]
QUANTIZED = [*ROUNDED, (Format.Q4_K, 0), (Format.Q6_K, 0), *ZERO]

GGUF_NAMES = {
    Format.INT4: "Q4_0",
    Format.INT4_MIN: "Q4_1",
    Format.INT8_GROUP: "Q8_0",
    Format.Q4_K: "Q4_K",
    Format.Q6_K: "Q6_K",
}
# Columns and bytes of a block, and where its float16 scales lie.
GGUF_BLOCKS = {
    Format.INT4: (32, 18, (0,)),
    Format.INT4_MIN: (32, 20, (0, 2)),
    Format.INT8_GROUP: (32, 34, (0,)),
    Format.Q4_K: (256, 144, (0, 2)),
    Format.Q6_K: (256, 210, (208,)),
}


def format_id(case: tuple[ops.PackedFormat, int]) -> str:
    packed_format, group_size = case
    return f"{packed_format.name}-{group_size}" if group_size else packed_format.name


def gguf_blocks(packed_format: ops.PackedFormat, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Random blocks uint8 [rows, bytes]: every quant and every 6-bit scale, normal scales."""
    block_cols, block_bytes, scales = GGUF_BLOCKS[packed_format]
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, cols // block_cols, block_bytes)
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    for i, at in enumerate(scales):
        scale = randn(seed + 1 + i, *shape[:2], 1).mul(1e-2 if block_cols == 32 else 1e-4).half()
        blocks[..., at : at + 2] = scale.view(torch.uint8)
    return blocks.flatten(1)


def zero_quants(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(quants, scales, zeros) of INT4_ZERO near a weight [rows, cols]."""
    cols = weight.size(1)
    groups = torch.nn.functional.pad(weight.float(), (0, -cols % group_size))
    groups = groups.unflatten(1, (-1, group_size))
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((most - least) / 15).half()
    zeros = (-least / scales).round().to(torch.uint8)
    q = (groups / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return q.clamp(0, 15).to(torch.uint8).flatten(1)[:, :cols], scales, zeros


def pack_near(weight: Tensor, *, format: int, group_size: int = 0) -> Tensor:
    """`pack_weight`, which does not round to INT4_ZERO, for every format but those of GGUF."""
    options = {"format": format, "group_size": group_size}
    if format != Format.INT4_ZERO:
        return ops.pack_weight(weight, **options)
    return ops.pack_quants(*zero_quants(weight, group_size), **options)


def alternated(gate: Tensor, up: Tensor, rows: int) -> Tensor:
    """Two packed weights as `pack_gate_up` lays them."""
    panels = -(-rows // 16)
    return torch.stack([packed.view(panels, -1) for packed in (gate, up)], 1).flatten()


def packed_weight(case: tuple[ops.PackedFormat, int], rows: int, cols: int, seed: int = 0):
    """(keyword arguments of an op that name the weight, the float32 weight that it holds).

    cols are rounded up to what the format takes.
    """
    packed_format, group_size = case
    if case in ROUNDED:
        packed = reference.pack_weight(
            randn(seed, rows, cols).div(cols**0.5), format=packed_format, group_size=group_size
        )
    elif packed_format == Format.INT4_ZERO:
        quants, scales, zeros = zero_quants(randn(seed, rows, cols).div(cols**0.5), group_size)
        zeros[:, -1] = 16  # GPTQ's 15 + 1
        packed = reference.pack_quants(
            quants, scales, zeros, format=packed_format, group_size=group_size
        )
    else:
        cols += -cols % 256
        blocks = gguf_blocks(packed_format, rows, cols, seed)
        packed = reference.pack_gguf(blocks, format=packed_format, rows=rows, cols=cols)
    options = {"format": int(packed_format), "rows": rows, "group_size": group_size}
    weight = reference.unpack_weight(packed, cols=cols, **options)
    return {"packed": packed, **options}, weight
