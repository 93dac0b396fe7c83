"""Sinks, soft-cap, scale and the log-sum-exp: worked numbers and float64."""

from __future__ import annotations

import math

import pytest
import torch

from fasttps import isa
from tests.support.attention import attention_in_float64, attention_inputs, randn
from tests.support.attention_checks import run


def three_zero_scores(sink=None, num_heads=1, first=0, last=3, **options):
    """Value rows 1, 2, 6 under a query of zeros, attended from slot `first` up to `last`."""
    values = torch.tensor([1.0, 2.0, 6.0])[first:last].view(1, 1, -1, 1)
    return {
        "query": torch.zeros(1, 1, num_heads, 8),
        "key": None,
        "value": None,
        "k_cache": randn(0, 1, 1, last - first, 8),
        "v_cache": values.expand(1, 1, last - first, 8).clone(),
        "seq_lens": torch.tensor(last - first),
        "sinks": None if sink is None else torch.tensor(sink),
    } | options


@pytest.mark.parametrize(
    "sink, expected", [(0.0, 2.25), (1.0, 1.573899), (30.0, 8.42e-13), (None, 3.0)]
)
def test_sink_takes_its_share(device, attention_op, sink, expected):
    inputs = three_zero_scores(None if sink is None else [sink])
    out, lse = run(device, attention_op, inputs, return_lse=True)
    torch.testing.assert_close(out, torch.full_like(out, expected), rtol=1e-3, atol=1e-14)
    total = 3 + (0 if sink is None else math.exp(sink))
    assert lse.item() == pytest.approx(math.log(total), rel=1e-6)


def test_sinks_go_by_query_head(device, attention_op):
    """One logit per query head, also where query heads share a KV head."""
    out = run(device, attention_op, three_zero_scores([0.0, 1.0, -math.inf], num_heads=3))
    expected = torch.tensor([2.25, 1.573899, 3.0]).view(1, 1, 3, 1).expand_as(out)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


def test_sink_counts_once_over_a_split_cache(device, attention_op):
    """Counted in both parts, a sink of 0 gives 1.8 in place of 2.25."""
    parts = [
        run(device, attention_op, three_zero_scores([0.0], last=2), return_lse=True),
        run(device, attention_op, three_zero_scores(first=2), return_lse=True),
    ]
    outs, lses = ([device.tensor(t) for t in column] for column in zip(*parts))
    out, lse = device.call("merge_attention", outs=outs, lses=lses)
    torch.testing.assert_close(out.cpu(), torch.full((1, 1, 1, 8), 2.25), rtol=1e-6, atol=0)
    assert lse.item() == pytest.approx(math.log(4), rel=1e-6)


def test_sink_beside_a_window(device, attention_op):
    """The sink stays in the denominator when the window drops keys: (2 + 6) / 3."""
    inputs = three_zero_scores([0.0], window=2, query_start=torch.tensor(2))
    out = run(device, attention_op, inputs)
    torch.testing.assert_close(out, torch.full_like(out, 8 / 3), rtol=1e-6, atol=0)


def test_row_that_sees_nothing_but_its_sink(device, attention_op):
    inputs = three_zero_scores([1.25], attn_mask=torch.zeros(1, 1, 1, 3, dtype=torch.bool))
    out, lse = run(device, attention_op, inputs, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.item() == pytest.approx(1.25, rel=1e-6)


def test_softcap_of_a_worked_example(device, attention_op):
    """Scores 3 and 0 capped at 2: weights exp(2 tanh 1.5) to 1."""
    inputs = three_zero_scores(last=2, softcap=2.0, scale=1.0)
    inputs["query"][..., 0] = 1.0
    inputs["k_cache"].zero_()[0, 0, 0, 0] = 3.0
    weight = math.exp(2 * math.tanh(1.5))
    out, lse = run(device, attention_op, inputs, return_lse=True)
    expected = torch.full_like(out, (weight * 1 + 2) / (weight + 1))
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=0)
    assert lse.item() == pytest.approx(math.log(weight + 1), rel=2e-6)


def test_softcap_applies_after_the_scale(device, attention_op):
    inputs = three_zero_scores(last=2, softcap=2.0, scale=0.5)
    inputs["query"][..., 0] = 1.0
    inputs["k_cache"].zero_()[0, 0, 0, 0] = 6.0
    weight = math.exp(2 * math.tanh(1.5))
    out = run(device, attention_op, inputs)
    expected = torch.full_like(out, (weight * 1 + 2) / (weight + 1))
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("scale", [0.0, -1.0, 3.0])
def test_any_scale(device, attention_op, scale):
    inputs = attention_inputs(past=9, scale=scale)
    exact, _ = attention_in_float64(inputs)
    out = run(device, attention_op, inputs)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"softcap": 3.0}, {"sinks": torch.tensor([0.0, 9.0, -9.0, 1.0])}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_lse_and_float32_out(device, attention_op, dtype, options):
    """Both results in float32, whatever the inputs; scores of 64 products of about 1 each."""
    inputs = attention_inputs(dtype=dtype, past=[19, 4], new_tokens=3, **options)
    exact_out, exact_lse = attention_in_float64(inputs)
    out, lse = run(device, attention_op, inputs, return_lse=True)
    assert out.dtype == lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    assert lse.shape == (2, 4, 3)
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=4e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=4e-6)


def test_lse_does_not_change_the_output(device, attention_op):
    """Where bf16 is multiplied in float32; else weights are rounded to bf16 without lse alone."""
    inputs = attention_inputs(past=9, new_tokens=3, dtype=torch.bfloat16, rotary_dim=64)
    with isa.bf16_product_forced("fma"):
        with_lse, _ = run(device, attention_op, inputs, return_lse=True)
        assert torch.equal(run(device, attention_op, inputs), with_lse.bfloat16())
