"""A decoder layer compiled by inductor, which lays out memory and reuses it on its own."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn.functional import linear

from fasttps import ops

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, MAX_SEQ_LEN = 64, 96, 4, 2, 16, 32
# Of a layer whose answers are near 1: inductor may order the sums of its own loops anew.
TOLERANCE = 1e-5


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    sizes = {
        "qkv": (rows, HIDDEN),
        "out": (HIDDEN, HEADS * HEAD_DIM),
        "gate": (INTERMEDIATE, HIDDEN),
        "up": (INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }
    made = {
        name: torch.randn(size, generator=generator) * size[1] ** -0.5
        for name, size in sizes.items()
    }
    packed = ops.PackedFormat.F32
    gate_up = ops.pack_gate_up(made.pop("gate"), made.pop("up"), format=packed)
    return {**made, "gate_up": gate_up, "down": ops.pack_weight(made["down"], format=packed)}


def layer(
    x: Tensor, w: dict[str, Tensor], k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor
) -> Tensor:
    qkv = linear(x, w["qkv"]).unflatten(-1, (-1, HEAD_DIM))
    query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    position = seq_lens + torch.arange(x.size(1))
    angle = position[:, None] * 10000.0 ** (-torch.arange(0, 1, 2 / HEAD_DIM))
    cos, sin = (t.repeat(1, 2)[None] for t in (angle.cos(), angle.sin()))
    op = ops.rope_attention_decode if x.size(1) < 4 else ops.causal_prefill
    attended = op(query, key, value, k_cache, v_cache, seq_lens, cos, sin)
    x = x + linear(attended.flatten(2), w["out"])
    return x + ops.gate_up_silu_mlp(
        torch.nn.functional.rms_norm(x, (HIDDEN,)),
        w["gate_up"],
        w["down"],
        gate_up_format=ops.PackedFormat.F32,
        down_format=ops.PackedFormat.F32,
        intermediate_size=INTERMEDIATE,
    )


def generate(layer, tokens: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """A prompt of five and then one token after another; all answers, and the caches."""
    w = weights()
    k_cache, v_cache = torch.zeros(2, 1, KV_HEADS, MAX_SEQ_LEN, HEAD_DIM)
    seq_lens = torch.tensor(0)
    x = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
    answers = []
    for _ in range(1 + tokens):
        answers.append(layer(x, w, k_cache, v_cache, seq_lens).clone())
        seq_lens += x.size(1)
        # A copy, since a view of the prompt's answer has strides of its own: another graph.
        x = answers[-1][:, -1:].clone(memory_format=torch.contiguous_format)
    return answers, k_cache, v_cache


@pytest.mark.slow
def test_layer_compiled_by_inductor_equals_eager_and_compiles_once():
    wanted, *wanted_caches = generate(layer, tokens=6)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    with torch.no_grad():
        compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=False)
        got, *caches = generate(compiled, tokens=6)
    assert counter.frame_count == 2, "one graph for the prompt and one for every token"
    for one, other in zip(got + caches, wanted + wanted_caches):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)
