"""rope_attention_decode where it is made for: one token, or a few, over a long cache."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention import attention_inputs, probe_means, uniform_probe
from tests.support.attention_checks import check_attention, run

OP = "rope_attention_decode"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.mark.parametrize("past", [2000, 4095])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_long_cache_split_over_threads(device, dtype, past, num_kv_heads):
    """Few heads, so that a head's cache itself is divided and merged."""
    inputs = attention_inputs(
        dtype=dtype,
        batch=1,
        num_heads=3 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        past=past,
        max_seq_len=4096,
        rotary_dim=64,
    )
    check_attention(device, OP, inputs)


@pytest.mark.parametrize("new_tokens", [2, 5, 8])
def test_speculative_tokens_over_a_long_cache(device, new_tokens):
    inputs = attention_inputs(
        dtype=torch.bfloat16,
        batch=1,
        num_kv_heads=1,
        past=1500,
        new_tokens=new_tokens,
        max_seq_len=1600,
        rotary_dim=64,
    )
    check_attention(device, OP, inputs)


def test_long_int8_cache(device, dtype):
    inputs = attention_inputs(
        dtype=dtype, batch=1, num_kv_heads=1, past=1500, max_seq_len=1600, rotary_dim=64, int8=True
    )
    check_attention(device, OP, inputs)


@pytest.mark.parametrize(
    "limits", [{"window": 100}, {"kv_start": torch.tensor([2900])}, {"softcap": 2.0}], ids=str
)
def test_limits_over_a_long_cache(device, limits):
    """Parts of a split that see nothing are merged with parts that do."""
    inputs = attention_inputs(
        dtype=torch.bfloat16, batch=1, num_kv_heads=1, past=2999, max_seq_len=3000, **limits
    )
    check_attention(device, OP, inputs)


def test_sink_counts_once_over_threads(device):
    """3000 zero scores and a sink of log 3000: half of the plain mean."""
    inputs = uniform_probe(kv_len=3000, num_heads=2, max_seq_len=3001)
    plain = probe_means(run(device, OP, inputs))
    inputs["sinks"] = torch.full((2,), 3000.0).log()
    assert probe_means(run(device, OP, inputs)) == pytest.approx([plain[0] / 2], rel=1e-5)


@pytest.mark.parametrize("position", [0, 1, 700, 1400, 1498, 1499])
def test_one_key_takes_all_wherever_it_lies(device, position):
    """A part whose maximum is far below the others' must vanish, not overflow."""
    inputs = uniform_probe(kv_len=1500, head_dim=32)
    inputs["query"] = torch.ones(1, 1, 1, 32)
    inputs["k_cache"] = torch.full_like(inputs["k_cache"], -50.0)
    inputs["key"] = torch.full_like(inputs["key"], -50.0)
    if position == 1499:
        inputs["key"].fill_(50.0)
    else:
        inputs["k_cache"][:, :, position] = 50.0
    assert probe_means(run(device, OP, inputs)) == [float(position)]


def test_batches_of_very_different_lengths(device):
    inputs = attention_inputs(
        dtype=torch.bfloat16,
        batch=5,
        past=[0, 1999, 3, 700, 1],
        max_seq_len=2000,
        num_heads=2,
        num_kv_heads=1,
        rotary_dim=64,
    )
    check_attention(device, OP, inputs)


def test_greedy_loop_fills_a_cache(device):
    """200 steps, each over what the steps before wrote, against one float64 pass at the end."""
    steps = 200
    whole = attention_inputs(
        batch=2, new_tokens=steps, past=0, max_seq_len=steps, rotary_dim=64, num_heads=2
    )
    arguments = device.arguments(whole)
    for step in range(steps):
        now = slice(step, step + 1)
        one = {name: arguments[name][:, now] for name in ("query", "key", "value", "cos", "sin")}
        out = device.call(OP, **(arguments | one | {"seq_lens": torch.tensor(step)}))
    expected = run(device, OP, whole)[:, -1:]
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_a_context_of_128k_in_one_call(device, int8):
    """Split over threads, ragged: the short sequence must not wait for the long one's threads."""
    check_attention(
        device,
        OP,
        attention_inputs(
            dtype=torch.bfloat16,
            num_heads=4,
            num_kv_heads=1,
            past=[(128 << 10) - 1, 77],
            max_seq_len=128 << 10,
            rotary_dim=64,
            int8=int8,
        ),
    )
