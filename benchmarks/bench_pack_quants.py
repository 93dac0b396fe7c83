"""pack_quants against a copy of the quants, the least it could cost.

Quants lie by rows, as compressed-tensors has them, or by columns, as AWQ and GPTQ have them.
Counted bytes: the quants, a byte each, and their scales read once, the packed weight written once.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import shapes
import torch

import fasttps
from fasttps.ops import PackedFormat

GROUPS = {
    PackedFormat.INT8: 0,
    PackedFormat.INT4: 128,
    PackedFormat.INT8_GROUP: 32,
    PackedFormat.INT4_ZERO: 128,
}


def case_of(model: shapes.ModelShape, packed_format: PackedFormat, by_rows: bool) -> harness.Case:
    rows, cols, group_size = model.intermediate_size, model.hidden_size, GROUPS[packed_format]
    quants = torch.randint(16, (rows, cols), dtype=torch.uint8)
    if not by_rows:
        quants = quants.t().contiguous().t()
    groups = -(-cols // group_size) if group_size else 1
    scales = torch.rand(rows, groups).to(torch.float16 if group_size else torch.float32)
    zeros = None
    if packed_format == PackedFormat.INT4_ZERO:
        zeros = torch.randint(16, (rows, groups), dtype=torch.uint8)

    def pack() -> torch.Tensor:
        return fasttps.ops.pack_quants(
            quants, scales, zeros, format=packed_format, group_size=group_size
        )

    return harness.Case(
        f"{model.name} {packed_format.name.lower()} {rows}x{cols} by {'rows' * by_rows or 'cols'}",
        torch.float16,
        {harness.OURS: pack, "clone": quants.clone},
        read_bytes=quants.numel() + scales.nbytes + (0 if zeros is None else zeros.nbytes),
        written_bytes=pack().numel(),
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    for model in (shapes.SMOLLM2_135M,) if quick else (shapes.LLAMA_3_2_1B,):
        for packed_format in GROUPS:
            for by_rows in (True, False):
                yield case_of(model, packed_format, by_rows)


if __name__ == "__main__":
    harness.main("pack_quants", cases)
