"""Both ways to multiply bf16 are accurate, and the one that is asked for is the one that runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from fasttps import isa, ops, reference
from tests.support.accuracy import assert_accurate
from tests.support.attention import randn
from tests.support.decoder import Decoder

BF16 = ops.PackedFormat.BF16
needs_both = pytest.mark.skipif(
    "avx512_bf16" not in isa.available(), reason="this CPU lacks avx512_bf16"
)


@pytest.fixture(params=["dpbf16", "fma"])
def product(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in isa.bf16_products():
        pytest.skip(f"this CPU does not run {request.param}")
    with isa.bf16_product_forced(request.param):
        yield request.param


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 33, 300])
def test_packed_linear(device, product, tokens):
    weight = randn(0, 40, 131).div(131**0.5).bfloat16()
    x = randn(1, tokens, 131, dtype=torch.bfloat16)
    packed = reference.pack_weight(weight, format=BF16)
    arguments = {"x": x, "packed": packed, "format": int(BF16), "rows": 40}
    out = device.call("packed_linear", **device.arguments(arguments))
    exact = functional.linear(x.double(), weight.double())
    assert_accurate(out, exact, functional.linear(x, weight))


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_gate_up_silu_mlp(device, product, tokens):
    gate, up = (randn(seed, 50, 64).div(8).bfloat16() for seed in (0, 1))
    down = randn(2, 64, 50).div(50**0.5).bfloat16()
    x = randn(3, tokens, 64, dtype=torch.bfloat16)
    arguments = {
        "x": x,
        "gate_up": reference.pack_gate_up(gate, up, format=BF16),
        "down": reference.pack_weight(down, format=BF16),
        "gate_up_format": int(BF16),
        "down_format": int(BF16),
        "intermediate_size": 50,
    }
    out = device.call("gate_up_silu_mlp", **device.arguments(arguments))

    def mlp(x, gate, up, down):
        h = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
        return functional.linear(h, down)

    exact = mlp(*(t.double() for t in (x, gate, up, down)))
    assert_accurate(out, exact, mlp(x, gate, up, down))


def test_decode_step(device, product):
    decoder = Decoder(dtype=torch.bfloat16)
    x = randn(1, 2, 1, decoder.hidden_size, dtype=decoder.dtype)
    arguments = decoder.arguments(x, [4, 9])
    exact, in_torch = (decoder.in_torch(arguments, t) for t in (torch.float64, decoder.dtype))
    out = device.call("decode_step", **device.arguments(arguments))
    assert_accurate(out, exact, in_torch)


@needs_both
@pytest.mark.parametrize("product, flushes", [("dpbf16", True), ("fma", False)])
def test_the_one_that_is_asked_for_runs(product, flushes):
    """vdpbf16ps takes a subnormal for zero, f32 FMA does not."""
    tiny = torch.full((1, 32), 1e-39, dtype=torch.bfloat16)
    packed = ops.pack_weight(torch.ones(16, 32, dtype=torch.bfloat16), format=BF16)
    with isa.forced("avx512_bf16"), isa.bf16_product_forced(product):
        out = ops.packed_linear(tiny, packed, format=BF16, rows=16)
    assert bool((out == 0).all()) == flushes
    assert bool((out > 0).all()) != flushes


@needs_both
def test_other_isas_multiply_by_fma_whatever_is_asked():
    tiny = torch.full((1, 32), 1e-39, dtype=torch.bfloat16)
    packed = ops.pack_weight(torch.ones(16, 32, dtype=torch.bfloat16), format=BF16)
    for name in ("avx512", "avx2", "scalar"):
        for product in isa.bf16_products():
            with isa.forced(name), isa.bf16_product_forced(product):
                assert bool((ops.packed_linear(tiny, packed, format=BF16, rows=16) > 0).all())
