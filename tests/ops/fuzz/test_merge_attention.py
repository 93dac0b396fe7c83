"""Random calls of merge_attention, valid and wrong."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.attention import randn
from tests.support.fuzz import (
    assert_close_to_twin,
    check_spoiled_calls,
    devices,
    many,
    seeds,
    several_strides,
    twin,
)

OP = "merge_attention"


@st.composite
def merge_calls(draw):
    """Parts of any number and stride; some saw nothing, some logits are far apart."""
    shape = [draw(st.integers(0, 3)) for _ in range(3)] + [draw(st.integers(1, 70))]
    batch, new_tokens, num_heads, _ = shape
    spread = draw(st.sampled_from([0.0, 1.0, 30.0, 1000.0]))
    outs, lses = [], []
    for _ in range(draw(st.integers(1, 6))):
        out = randn(draw(seeds), *shape)
        lse = randn(draw(seeds), batch, num_heads, new_tokens) * spread
        lse = lse.masked_fill(randn(draw(seeds), *lse.shape) > 1, -math.inf)
        outs.append(several_strides(draw, out, (0, 1, 2)))
        lses.append(several_strides(draw, lse, (0, 1, 2)))
    return {"outs": outs, "lses": lses}


def test_valid_merges():
    """A merged element is a convex sum: a few roundings of the largest part."""

    @many
    @given(devices, merge_calls())
    def check(device, call):
        exact_out, exact_lse = twin(OP, {n: [t.double() for t in call[n]] for n in call})
        with device.active():
            out, lse = device.call(OP, **device.arguments(call))
        assert out.is_contiguous() and lse.is_contiguous()
        torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=4e-6)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)

    check()


def test_spoiled_merges():
    calls = merge_calls().map(lambda call: (OP, call))
    check_spoiled_calls(calls, assert_close_to_twin)
