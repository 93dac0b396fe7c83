"""gate_up_silu_mlp against the chain of F.linear, for one token and for a prompt.

Counted bytes: the three weights, once. Several layers' weights are used in turn, as a model does,
so that none is warm in the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import shapes
import torch
import torch.nn.functional as F

import fasttps
from fasttps.ops import PackedFormat


def layer_calls(
    model: shapes.ModelShape, kind: shapes.WeightKind, tokens: int
) -> tuple[int, dict[str, Callable[[], object]]]:
    """Bytes of the packed weights, and the calls of one layer with its own, plain and packed."""
    hidden, intermediate = model.hidden_size, model.intermediate_size
    gate = (torch.randn(intermediate, hidden) * hidden**-0.5).to(kind.dtype)
    up = (torch.randn(intermediate, hidden) * hidden**-0.5).to(kind.dtype)
    down = (torch.randn(hidden, intermediate) * intermediate**-0.5).to(kind.dtype)
    x = torch.randn(1, tokens, hidden).to(kind.dtype)
    packing = {"format": kind.format, "group_size": kind.group_size}
    packed_gate_up = fasttps.ops.pack_gate_up(gate, up, **packing)
    packed_down = fasttps.ops.pack_weight(down, **packing)
    return packed_gate_up.numel() + packed_down.numel(), {
        harness.OURS: lambda: fasttps.ops.gate_up_silu_mlp(
            x,
            packed_gate_up,
            packed_down,
            gate_up_format=kind.format,
            down_format=kind.format,
            intermediate_size=intermediate,
            gate_up_group_size=kind.group_size,
            down_group_size=kind.group_size,
            int8_activation=kind.int8_activation,
        ),
        "linear_chain": lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
    }


def case_of(model: shapes.ModelShape, kind: shapes.WeightKind, tokens: int) -> harness.Case:
    weight_bytes, first = layer_calls(model, kind, tokens)
    copies = harness.copies_beyond_cache(weight_bytes, limit_bytes=256 << 20)
    layers = [first, *(layer_calls(model, kind, tokens)[1] for _ in range(copies - 1))]
    return harness.Case(
        f"{model.name} {kind.name} tokens {tokens}",
        kind.dtype,
        {name: harness.rotate([layer[name] for layer in layers]) for name in first},
        read_bytes=weight_bytes,
        footprint_bytes=weight_bytes * len(layers),
        flops=6 * tokens * model.hidden_size * model.intermediate_size,
        product=kind.product,
        notes={"layers_in_turn": len(layers), "format": kind.name},
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    model = shapes.SMOLLM2_135M if quick else shapes.LLAMA_3_2_1B
    for of_bf16 in (model,) if quick else shapes.ALL:
        for tokens in (1, 64) if quick else (1, 8, 128):
            yield case_of(of_bf16, shapes.BF16, tokens)
    for kind in shapes.QUANTIZED:
        for tokens in (1,) if quick else (1, 8, 128):
            yield case_of(model, kind, tokens)
    if not quick:
        yield case_of(model, shapes.WeightKind("f32", PackedFormat.F32), 1)
        yield case_of(model, shapes.WeightKind("f16", PackedFormat.F16), 1)


if __name__ == "__main__":
    harness.main("gate_up_silu_mlp", cases)
