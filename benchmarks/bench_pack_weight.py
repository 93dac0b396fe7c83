"""pack_weight, pack_gate_up and their undo against a copy of the weight, the least it could cost.

Counted bytes: the weight read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import shapes
import torch

import fasttps
from fasttps.ops import PackedFormat


def cases_of(model: shapes.ModelShape, dtype: torch.dtype) -> Iterator[harness.Case]:
    rows, cols = model.intermediate_size, model.hidden_size
    gate, up = torch.randn(rows, cols).to(dtype), torch.randn(rows, cols).to(dtype)
    packed_format = PackedFormat.of(dtype)
    packed = fasttps.ops.pack_weight(gate, format=packed_format)
    weight_bytes = gate.numel() * gate.element_size()

    def case(name: str, calls: dict[str, Callable[[], object]], moved_bytes: int) -> harness.Case:
        return harness.Case(
            f"{model.name} {name} {rows}x{cols}",
            dtype,
            calls,
            read_bytes=moved_bytes,
            written_bytes=moved_bytes,
        )

    yield case(
        "pack_weight",
        {
            harness.OURS: lambda: fasttps.ops.pack_weight(gate, format=packed_format),
            "clone": gate.clone,
        },
        weight_bytes,
    )
    yield case(
        "pack_gate_up",
        {
            harness.OURS: lambda: fasttps.ops.pack_gate_up(gate, up, format=packed_format),
            "clone": lambda: (gate.clone(), up.clone()),
        },
        2 * weight_bytes,
    )
    yield case(
        "unpack_weight",
        {
            harness.OURS: lambda: fasttps.ops.unpack_weight(
                packed, format=packed_format, rows=rows, cols=cols
            ),
            "clone": gate.clone,
        },
        weight_bytes,
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    for model in (shapes.SMOLLM2_135M,) if quick else shapes.ALL:
        for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
            yield from cases_of(model, dtype)


if __name__ == "__main__":
    harness.main("pack_weight", cases)
