"""packed_linear against F.linear, for one token, a few, and a prompt.

Counted bytes: the weight, once. Several weights are used in turn, as a model does, so that none is
warm in the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import shapes
import torch
import torch.nn.functional as F

import fasttps
from fasttps.ops import PackedFormat


def weight_calls(
    rows: int, cols: int, dtype: torch.dtype, tokens: int
) -> dict[str, Callable[[], object]]:
    """The calls of one weight, plain and packed."""
    weight = (torch.randn(rows, cols) * cols**-0.5).to(dtype)
    x = torch.randn(1, tokens, cols).to(dtype)
    packed_format = PackedFormat.of(dtype)
    packed = fasttps.ops.pack_weight(weight, format=packed_format)
    return {
        harness.OURS: lambda: fasttps.ops.packed_linear(x, packed, format=packed_format, rows=rows),
        "linear": lambda: F.linear(x, weight),
    }


def case_of(
    model: shapes.ModelShape, rows: int, cols: int, dtype: torch.dtype, tokens: int
) -> harness.Case:
    weight_bytes = rows * cols * dtype.itemsize
    weights = [
        weight_calls(rows, cols, dtype, tokens)
        for _ in range(harness.copies_beyond_cache(weight_bytes, limit_bytes=512 << 20))
    ]
    return harness.Case(
        f"{model.name} {rows}x{cols} tokens {tokens}",
        dtype,
        {name: harness.rotate([calls[name] for calls in weights]) for name in weights[0]},
        read_bytes=weight_bytes,
        footprint_bytes=weight_bytes * len(weights),
        flops=2 * tokens * rows * cols,
        notes={"weights_in_turn": len(weights)},
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    for model in (shapes.SMOLLM2_135M,) if quick else shapes.ALL:
        for tokens in (1, 64) if quick else (1, 8, 512):
            for rows, cols in (
                (model.hidden_size, model.hidden_size),
                (model.hidden_size, model.intermediate_size),
            ):
                yield case_of(model, rows, cols, torch.bfloat16, tokens)
    if not quick:
        yield case_of(shapes.LLAMA_3_2_1B, 2048, 2048, torch.float32, 1)


if __name__ == "__main__":
    harness.main("packed_linear", cases)
