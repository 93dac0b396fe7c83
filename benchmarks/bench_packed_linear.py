"""packed_linear against F.linear, for one token, a few, and a prompt.

Counted bytes: the weight, once. Several weights are used in turn, as a model does, so that none is
warm in the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import harness
import shapes
import torch
import torch.nn.functional as F

import fasttps
from fasttps.ops import PackedFormat


@dataclass(frozen=True)
class Kind:
    """How the weight is packed, and whether activations are rounded to int8."""

    name: str
    format: PackedFormat
    group_size: int = 0
    int8_activation: bool = False


BF16 = Kind("bf16", PackedFormat.BF16)
QUANTIZED = (
    Kind("int8 a8", PackedFormat.INT8, int8_activation=True),
    Kind("int4 g32 a8", PackedFormat.INT4, 32, int8_activation=True),
    Kind("int8 a16", PackedFormat.INT8),
    Kind("int4 g32 a16", PackedFormat.INT4, 32),
)


def weight_calls(
    rows: int, cols: int, kind: Kind, tokens: int
) -> tuple[int, dict[str, Callable[[], object]]]:
    """Bytes of one packed weight, and the calls of it, plain and packed."""
    dtype = kind.format.dtype if not kind.format.is_quantized else torch.bfloat16
    weight = (torch.randn(rows, cols) * cols**-0.5).to(dtype)
    x = torch.randn(1, tokens, cols).to(dtype)
    packed = fasttps.ops.pack_weight(weight, format=kind.format, group_size=kind.group_size)
    return packed.numel(), {
        harness.OURS: lambda: fasttps.ops.packed_linear(
            x,
            packed,
            format=kind.format,
            rows=rows,
            group_size=kind.group_size,
            int8_activation=kind.int8_activation,
        ),
        "linear": lambda: F.linear(x, weight),
    }


def case_of(
    model: shapes.ModelShape, rows: int, cols: int, kind: Kind, tokens: int
) -> harness.Case:
    weight_bytes, first = weight_calls(rows, cols, kind, tokens)
    copies = harness.copies_beyond_cache(weight_bytes, limit_bytes=256 << 20)
    weights = [first, *(weight_calls(rows, cols, kind, tokens)[1] for _ in range(copies - 1))]
    return harness.Case(
        f"{model.name} {rows}x{cols} {kind.name} tokens {tokens}",
        torch.float32 if kind.format is PackedFormat.F32 else torch.bfloat16,
        {name: harness.rotate([calls[name] for calls in weights]) for name in first},
        read_bytes=weight_bytes,
        flops=2 * tokens * rows * cols,
        notes={"weights_in_turn": len(weights), "format": kind.name},
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    for model in (shapes.SMOLLM2_135M,) if quick else shapes.ALL:
        for tokens in (1, 64) if quick else (1, 8, 512):
            for rows, cols in (
                (model.hidden_size, model.hidden_size),
                (model.hidden_size, model.intermediate_size),
            ):
                yield case_of(model, rows, cols, BF16, tokens)
    model = shapes.SMOLLM2_135M if quick else shapes.LLAMA_3_2_1B
    for kind in QUANTIZED:
        for tokens in (1,) if quick else (1, 8, 512):
            yield case_of(model, model.hidden_size, model.intermediate_size, kind, tokens)
    if not quick:
        yield case_of(model, 2048, 2048, Kind("f32", PackedFormat.F32), 1)


if __name__ == "__main__":
    harness.main("packed_linear", cases)
