"""packed_linear against F.linear, for one token, those of a batch, and a prompt.

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


def pack(weight: torch.Tensor, kind: shapes.WeightKind) -> torch.Tensor:
    options = {"format": kind.format, "group_size": kind.group_size}
    if kind.format != PackedFormat.INT4_ZERO:
        return fasttps.ops.pack_weight(weight, **options)
    rows, cols = weight.shape
    quants, zeros = (
        torch.randint(16, (rows, count), dtype=torch.uint8)
        for count in (cols, cols // kind.group_size)
    )
    return fasttps.ops.pack_quants(quants, torch.rand(zeros.shape).half(), zeros, **options)


def weight_calls(
    rows: int, cols: int, kind: shapes.WeightKind, tokens: int
) -> tuple[int, dict[str, Callable[[], object]]]:
    """Bytes of one packed weight, and the calls of it, plain and packed."""
    dtype = kind.dtype
    weight = (torch.randn(rows, cols) * cols**-0.5).to(dtype)
    x = torch.randn(1, tokens, cols).to(dtype)
    packed = pack(weight, kind)
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
    model: shapes.ModelShape, rows: int, cols: int, kind: shapes.WeightKind, tokens: int
) -> harness.Case:
    weight_bytes, first = weight_calls(rows, cols, kind, tokens)
    copies = harness.copies_beyond_cache(weight_bytes, limit_bytes=256 << 20)
    weights = [first, *(weight_calls(rows, cols, kind, tokens)[1] for _ in range(copies - 1))]
    return harness.Case(
        f"{model.name} {rows}x{cols} {kind.name} tokens {tokens}",
        kind.dtype,
        {name: harness.rotate([calls[name] for calls in weights]) for name in first},
        read_bytes=weight_bytes,
        footprint_bytes=weight_bytes * len(weights),
        flops=2 * tokens * rows * cols,
        product=kind.product,
        notes={"weights_in_turn": len(weights), "format": kind.name},
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    for model in (shapes.SMOLLM2_135M,) if quick else shapes.ALL:
        batches = (2, 4, 8, 16) if model is shapes.LLAMA_3_2_1B else (8,)
        for tokens in (1, 64) if quick else (1, *batches, 512):
            for rows, cols in (
                (model.hidden_size, model.hidden_size),
                (model.hidden_size, model.intermediate_size),
            ):
                yield case_of(model, rows, cols, shapes.BF16, tokens)
    model = shapes.SMOLLM2_135M if quick else shapes.LLAMA_3_2_1B
    for kind in (*shapes.QUANTIZED, *shapes.WITH_ZEROS):
        for tokens in (1,) if quick else (1, 2, 4, 8, 16, 512):
            yield case_of(model, model.hidden_size, model.intermediate_size, kind, tokens)
    if not quick:
        yield case_of(model, 2048, 2048, shapes.WeightKind("f32", PackedFormat.F32), 1)


if __name__ == "__main__":
    harness.main("packed_linear", cases)
