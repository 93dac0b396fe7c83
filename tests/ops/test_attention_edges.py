"""The edges of what an attention op takes: nothing at all, a full cache, caches that are views."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention import attention_inputs
from tests.support.attention_checks import run


@pytest.mark.parametrize("shape", [{"batch": 0, "past": 0}, {"new_tokens": 0}], ids=str)
@pytest.mark.parametrize("attend_only", [False, True], ids=["", "attend_only"])
def test_empty_batch_and_no_new_tokens(device, attention_op, shape, attend_only):
    """Empty outputs, nothing written."""
    inputs = attention_inputs(**({"past": 5} | shape), attend_only=attend_only, unused=0.0)
    arguments = device.arguments(inputs)
    out = device.call(attention_op, **arguments)
    assert out.shape == inputs["query"].shape and out.dtype == torch.float32
    out, lse = device.call(attention_op, **arguments, return_lse=True)
    assert out.shape == inputs["query"].shape
    assert lse.shape == (inputs["query"].size(0), 4, inputs["query"].size(1))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(arguments[name].cpu(), inputs[name])


def test_full_cache_is_filled_to_the_last_slot(device, attention_op):
    inputs = attention_inputs(past=[22, 3], new_tokens=2, max_seq_len=24)
    arguments = device.arguments(inputs)
    assert device.call(attention_op, **arguments).isfinite().all()
    assert torch.equal(arguments["v_cache"][0, :, 22:].cpu(), inputs["value"][0].transpose(0, 1))


def test_caches_that_are_only_read_may_be_expanded(device, attention_op):
    """Attend only: one cache for both sequences, as stride 0."""
    inputs = attention_inputs(attend_only=True, past=9)
    caches = {name: inputs[name][:1].expand(2, 2, 24, 64) for name in ("k_cache", "v_cache")}
    out = run(device, attention_op, inputs | caches)
    copied = {name: cache.clone() for name, cache in caches.items()}
    torch.testing.assert_close(out, run(device, attention_op, inputs | copied), rtol=0, atol=1e-6)


@pytest.mark.parametrize("start", [13, (1 << 63) - 101, (1 << 63) - 1])
def test_start_past_the_cache_sees_nothing(device, attention_op, start):
    """kv_start near 2^63 sent the split over threads round without end."""
    arguments = device.arguments(attention_inputs(past=[5, 9], attend_only=True))
    kv_start = device.tensor(torch.tensor([start, 0]))
    out = device.call(attention_op, **arguments, kv_start=kv_start)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(out[1], device.call(attention_op, **arguments)[1])


def test_window_and_start_at_the_ends_of_an_integer(device, attention_op):
    """The first position seen, query_start - window + 1, is beyond 64 bits."""
    arguments = device.arguments(attention_inputs(past=[5, 9], attend_only=True))
    largest = (1 << 63) - 1
    everything = device.call(attention_op, **arguments)
    assert torch.equal(device.call(attention_op, **arguments, window=largest), everything)
    before = device.tensor(torch.tensor(-largest - 1))
    nothing = device.call(attention_op, **arguments, window=largest, query_start=before)
    assert torch.equal(nothing, torch.zeros_like(nothing))
