"""NaN and inf: hidden rows add nothing whatever they hold, visible ones propagate."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention import attention_in_float64, attention_inputs, randn, uniform_probe
from tests.support.attention_checks import run

POISONS = [float("nan"), float("inf"), float("-inf")]


def poisoned(inputs, name, slots, poison, sequence=None):
    """A copy of the inputs with these slots of a cache filled with `poison`."""
    cache = inputs[name].clone()
    sequences = slice(None) if sequence is None else sequence
    cache[sequences, :, slots] = poison
    return inputs | {name: cache}


def assert_same(out, expected):
    """Equal but for the order of float32 sums: NaN among hidden rows may take another path."""
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unused_slots_do_not_reach_the_output(device, attention_op, dtype, poison):
    """Probability 0 times NaN is NaN: uninitialised slots made outputs fail at random."""
    shape = {
        "batch": 4,
        "num_heads": 8,
        "num_kv_heads": 8,
        "max_seq_len": 128,
        "past": [31, 63, 95, 47],
    }
    clean = attention_inputs(dtype=dtype, unused=0.0, **shape)
    filled = attention_inputs(dtype=dtype, unused=poison, **shape)
    out = run(device, attention_op, filled)
    assert out.isfinite().all()
    assert torch.equal(out, run(device, attention_op, clean))


HIDING = {
    "window": {"window": 4},
    "kv_start": {"kv_start": torch.tensor([8, 8])},
    "mask": {"attn_mask": (torch.arange(24) >= 8).expand(1, 1, 1, 24)},
    "query_start": {"query_start": torch.tensor(7), "attend_only": True},
    "ring": {"ring": True, "window": 4, "past": 58},
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_rows_hidden_by(device, attention_op, name, poison, int8):
    inputs = attention_inputs(**({"past": 12, "int8": int8, "rotary_dim": 64} | HIDING[name]))
    # Tokens 0..7 are hidden, with query_start tokens 8..11; in the ring slots 0..6 hold 48..54.
    hidden = slice(8, 12) if name == "query_start" else slice(0, 7)
    expected = run(device, attention_op, inputs)
    for cache in ("k_scale", "v_scale") if int8 else ("k_cache", "v_cache"):
        out = run(device, attention_op, poisoned(inputs, cache, hidden, poison))
        assert_same(out, expected)


@pytest.mark.parametrize("poison", POISONS)
def test_rows_hidden_from_some_tokens_and_heads_alone(device, attention_op, poison):
    """Row 5 holds NaN and is seen by token 1 in head 2: only there does it show."""
    mask = torch.ones(1, 4, 3, 24, dtype=torch.bool)
    mask[:, :, :, 5] = False
    mask[:, 2, 1, 5] = True
    inputs = attention_inputs(past=9, new_tokens=3, attn_mask=mask)
    expected = run(device, attention_op, inputs)
    out = run(device, attention_op, poisoned(inputs, "v_cache", 5, poison))
    assert not out[:, 1, 2].isfinite().any()
    out[:, 1, 2] = expected[:, 1, 2]
    assert_same(out, expected)


def test_future_new_tokens_do_not_reach_earlier_ones(device, attention_op):
    """A NaN in the value of new token 2 shows in tokens 2 and 3, not in 0 and 1."""
    inputs = attention_inputs(past=9, new_tokens=4)
    expected = run(device, attention_op, inputs)
    for name in ("key", "value"):
        rows = inputs[name].clone()
        rows[:, 2] = float("nan")
        out = run(device, attention_op, inputs | {name: rows})
        assert_same(out[:, :2], expected[:, :2])
        assert out[:, 2:].isnan().all(), name


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("slot", [0, 3, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_in_an_attended_row_propagates(device, attention_op, dtype, cache, slot):
    inputs = attention_inputs(dtype=dtype, past=12, new_tokens=2)
    expected = run(device, attention_op, inputs)
    out = run(device, attention_op, poisoned(inputs, cache, slot, float("nan"), sequence=1))
    assert out[1].isnan().all()
    assert torch.equal(out[0], expected[0])


def test_nan_in_one_element_of_a_value_shows_in_that_element(device, attention_op):
    inputs = attention_inputs(past=12)
    expected = run(device, attention_op, inputs)
    inputs["v_cache"][:, 1, 3, 40] = float("nan")
    out = run(device, attention_op, inputs)
    assert out[:, :, 2:, 40].isnan().all()  # query heads 2 and 3 read KV head 1
    out[:, :, 2:, 40] = expected[:, :, 2:, 40]
    assert torch.equal(out, expected)


def test_nan_in_one_element_of_a_key_shows_in_its_heads(device, attention_op):
    inputs = attention_inputs(past=12)
    expected = run(device, attention_op, inputs)
    inputs["k_cache"][:, 1, 3, 40] = float("nan")
    out = run(device, attention_op, inputs)
    assert out[:, :, 2:].isnan().all()
    assert torch.equal(out[:, :, :2], expected[:, :, :2])


@pytest.mark.parametrize("poison", POISONS[1:])
def test_inf_in_an_attended_value_propagates(device, attention_op, poison):
    inputs = attention_inputs(past=12)
    out = run(device, attention_op, poisoned(inputs, "v_cache", 3, poison))
    assert not out.isfinite().any()


@pytest.mark.parametrize("name", ["query", "cos", "sinks", "key", "value"])
def test_nan_in_an_argument_propagates(device, attention_op, name):
    inputs = attention_inputs(past=12, rotary_dim=64, sinks=torch.zeros(4))
    expected = run(device, attention_op, inputs)
    argument = inputs[name].clone()
    argument.view(-1)[5 if name == "cos" else 0] = float("nan")
    out = run(device, attention_op, inputs | {name: argument})
    if name == "value":  # one element of sequence 0, KV head 0
        assert out[0, :, :2, 0].isnan().all()
    else:  # query head 0; the heads of KV head 0; sink 0; both rows of a shared table
        assert out[0, :, 0].isnan().all()
    if name != "cos":
        assert torch.equal(out[:, :, 2:], expected[:, :, 2:])


@pytest.mark.parametrize("name", ["key", "value"])
def test_nan_in_a_row_that_is_quantized_propagates(device, attention_op, name):
    """A maximum that skips NaN would store a finite row."""
    inputs = attention_inputs(past=12, int8=True)
    inputs[name][0, 0, 1, 17] = float("nan")
    out = run(device, attention_op, inputs)
    assert out[0, :, 2:].isnan().any(-1).all()
    assert out[1].isfinite().all()


def test_nan_and_lse(device, attention_op):
    inputs = attention_inputs(past=12)
    inputs["k_cache"][0, 0, 3, 0] = float("nan")
    _, lse = run(device, attention_op, inputs, return_lse=True)
    assert lse[0, :2].isnan().all()
    assert lse[0, 2:].isfinite().all() and lse[1].isfinite().all()


def test_large_bfloat16_does_not_overflow_the_softmax(device, attention_op):
    """inf - inf in an online softmax; one visible key, so that the value comes back exactly."""
    huge = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    inputs = attention_inputs(batch=1, num_heads=1, num_kv_heads=1, past=0, dtype=torch.bfloat16)
    inputs |= {"query": huge, "key": huge.clone(), "value": huge.clone()}
    assert torch.equal(run(device, attention_op, inputs), huge)


def test_scores_far_apart(device, attention_op):
    """Scores of +-3e4: the largest takes all, in whatever block it lies."""
    for best in (0, 63, 64, 200, 299):
        inputs = uniform_probe(kv_len=300, num_kv_heads=1, head_dim=16)
        inputs["query"] = torch.full_like(inputs["query"], 100.0)
        inputs["k_cache"] = -torch.ones_like(inputs["k_cache"])
        inputs["key"] = -torch.ones_like(inputs["key"])
        if best == 299:
            inputs["key"].fill_(75.0)
        else:
            inputs["k_cache"][:, :, best] = 75.0
        out = run(device, attention_op, inputs)
        assert torch.equal(out, torch.full_like(out, float(best)))


def test_all_scores_very_negative(device, attention_op):
    """A running maximum that starts at a finite number would return zeros."""
    inputs = attention_inputs(past=12)
    inputs["query"] = torch.full_like(inputs["query"], 1e4)
    for name in ("k_cache", "key"):
        inputs[name] = -inputs[name].abs() * 1e30
    inputs["k_cache"][:, :, :12] = -1e30
    inputs["key"].fill_(-1e30)
    exact, exact_lse = attention_in_float64(inputs)
    out, lse = run(device, attention_op, inputs, return_lse=True)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=0)


def test_softcap_of_huge_scores_is_the_cap(device, attention_op):
    """tanh saturates; a quotient of exponentials would give inf / inf."""
    inputs = attention_inputs(past=12, softcap=2.0)
    inputs["query"] = randn(1, *inputs["query"].shape) * 1e6
    exact, _ = attention_in_float64(inputs)
    out = run(device, attention_op, inputs)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
