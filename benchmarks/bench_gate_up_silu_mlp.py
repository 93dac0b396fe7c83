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
    model: shapes.ModelShape, dtype: torch.dtype, tokens: int
) -> dict[str, Callable[[], object]]:
    """The calls of one layer with its own weights, plain and packed."""
    hidden, intermediate = model.hidden_size, model.intermediate_size
    gate = (torch.randn(intermediate, hidden) * hidden**-0.5).to(dtype)
    up = (torch.randn(intermediate, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(hidden, intermediate) * intermediate**-0.5).to(dtype)
    x = torch.randn(1, tokens, hidden).to(dtype)
    packed_format = PackedFormat.of(dtype)
    packed_gate_up = fasttps.ops.pack_gate_up(gate, up, format=packed_format)
    packed_down = fasttps.ops.pack_weight(down, format=packed_format)
    return {
        harness.OURS: lambda: fasttps.ops.gate_up_silu_mlp(
            x,
            packed_gate_up,
            packed_down,
            gate_up_format=packed_format,
            down_format=packed_format,
            intermediate_size=intermediate,
        ),
        "linear_chain": lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
    }


def case_of(model: shapes.ModelShape, dtype: torch.dtype, tokens: int) -> harness.Case:
    weight_bytes = 3 * model.hidden_size * model.intermediate_size * dtype.itemsize
    layers = [
        layer_calls(model, dtype, tokens)
        for _ in range(harness.copies_beyond_cache(weight_bytes, limit_bytes=512 << 20))
    ]
    return harness.Case(
        f"{model.name} tokens {tokens}",
        dtype,
        {name: harness.rotate([layer[name] for layer in layers]) for name in layers[0]},
        read_bytes=weight_bytes,
        footprint_bytes=weight_bytes * len(layers),
        flops=6 * tokens * model.hidden_size * model.intermediate_size,
        notes={"layers_in_turn": len(layers)},
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    if quick:
        yield case_of(shapes.SMOLLM2_135M, torch.bfloat16, 1)
        yield case_of(shapes.SMOLLM2_135M, torch.bfloat16, 64)
        return
    for model in shapes.ALL:
        for tokens in (1, 8, 128):
            yield case_of(model, torch.bfloat16, tokens)
    yield case_of(shapes.LLAMA_3_2_1B, torch.float32, 1)
    yield case_of(shapes.LLAMA_3_2_1B, torch.float16, 1)


if __name__ == "__main__":
    harness.main("gate_up_silu_mlp", cases)
