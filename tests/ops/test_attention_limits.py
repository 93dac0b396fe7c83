"""Which positions a token sees: numbers worked out by hand, and runs that must agree."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention import attention_inputs, copies, probe_means, randn, uniform_probe
from tests.support.attention_checks import run


def close(*numbers):
    return pytest.approx(list(numbers), rel=1e-6)


@pytest.mark.parametrize(
    "kv_len, mean",
    [
        (3, 1.0),  # keys 0..2, shorter than the window
        (4, 1.5),  # keys 0..3
        (5, 2.5),  # keys 1..4
        (8, 5.5),  # keys 4..7; five keys would give 5.0, three 6.0
    ],
)
def test_window_counts_the_current_token(device, attention_op, kv_len, mean):
    out = run(device, attention_op, uniform_probe(kv_len=kv_len, window=4))
    assert probe_means(out) == close(mean)


def test_window_over_a_whole_prompt(device, attention_op):
    out = run(device, attention_op, uniform_probe(kv_len=8, new_tokens=8, window=4))
    assert probe_means(out) == close(0.0, 0.5, 1.0, 1.5, 2.5, 3.5, 4.5, 5.5)


def test_window_is_kept_beside_a_mask(device, attention_op):
    mask = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    mask[..., 5] = False
    out = run(device, attention_op, uniform_probe(kv_len=8, window=4, attn_mask=mask))
    assert probe_means(out) == close((4 + 6 + 7) / 3)


def test_window_and_groups_with_fewer_queries_than_keys(device, attention_op):
    """The window hangs from the last key, not the first: 64 query heads on 8 KV heads."""
    shape = {"kv_len": 300, "num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "window": 128}
    assert probe_means(run(device, attention_op, uniform_probe(**shape))) == close(235.5)
    out = run(device, attention_op, uniform_probe(**shape, new_tokens=5))
    assert probe_means(out) == close(231.5, 232.5, 233.5, 234.5, 235.5)


def test_diagonal_is_bottom_right_on_a_filled_cache(device, attention_op):
    out = run(device, attention_op, uniform_probe(kv_len=7, new_tokens=3))
    assert probe_means(out) == close(2.0, 2.5, 3.0)


def test_more_queries_than_keys_gives_zeros_where_nothing_is_seen(device, attention_op):
    """Value rows 1 and 2, four queries, bottom-right: the first two see no key."""
    inputs = uniform_probe(kv_len=2, new_tokens=4)
    ones_and_twos = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1).expand(1, 1, 2, 8).clone()
    inputs |= {
        "key": None,
        "value": None,
        "k_cache": randn(1, 1, 1, 2, 8),
        "v_cache": ones_and_twos,
        "seq_lens": torch.tensor(2),
        "query_start": torch.tensor(-2),
    }
    assert probe_means(run(device, attention_op, inputs)) == close(0.0, 0.0, 1.0, 1.5)
    out, lse = run(device, attention_op, inputs, return_lse=True)
    assert probe_means(out) == close(0.0, 0.0, 1.0, 1.5)
    assert lse.flatten().tolist() == pytest.approx([-torch.inf, -torch.inf, 0.0, 0.6931472])


def test_query_start_moves_the_diagonal(device, attention_op):
    inputs = uniform_probe(kv_len=8, new_tokens=2)
    for start, means in ((0, (0.0, 0.5)), (5, (2.5, 3.0)), (8, (3.5, 3.5)), (1 << 40, (3.5, 3.5))):
        out = run(device, attention_op, inputs | {"query_start": torch.tensor(start)})
        assert probe_means(out) == close(*means)


def test_query_start_moves_the_window(device, attention_op):
    inputs = uniform_probe(kv_len=8, new_tokens=2, window=3, query_start=torch.tensor([4]))
    assert probe_means(run(device, attention_op, inputs)) == close(3.0, 4.0)


def test_window_past_the_cache_sees_nothing(device, attention_op):
    inputs = uniform_probe(kv_len=8, window=3, query_start=torch.tensor(1 << 40))
    assert probe_means(run(device, attention_op, inputs)) == [0.0]


def test_kv_start_hides_left_padding(device, attention_op):
    inputs = uniform_probe(kv_len=8, new_tokens=4, kv_start=torch.tensor([5]))
    assert probe_means(run(device, attention_op, inputs)) == close(0.0, 5.0, 5.5, 6.0)


def test_kv_start_beside_window_and_mask(device, attention_op):
    mask = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    mask[..., 6] = False
    inputs = uniform_probe(kv_len=8, window=6, kv_start=torch.tensor([4]), attn_mask=mask)
    assert probe_means(run(device, attention_op, inputs)) == close((4 + 5 + 7) / 3)


def test_mask_that_hides_everything_gives_zeros(device, attention_op):
    inputs = uniform_probe(kv_len=8, new_tokens=2, attn_mask=torch.zeros(1, 1, 2, 8).bool())
    out = run(device, attention_op, inputs)
    assert torch.equal(out, torch.zeros_like(out))
    out, lse = run(device, attention_op, inputs, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_window_as_wide_as_an_integer(device, attention_op):
    inputs = uniform_probe(kv_len=8, window=(1 << 63) - 1)
    assert probe_means(run(device, attention_op, inputs)) == close(3.5)


def test_one_visible_key_after_32768(device, attention_op):
    """A 16-bit column index is right up to here."""
    mask = torch.zeros(1, 1, 1, 33000, dtype=torch.bool)
    mask[..., 32900] = True
    inputs = uniform_probe(kv_len=33000, attn_mask=mask)
    inputs["v_cache"][:, :, 32900] = 7.0
    assert probe_means(run(device, attention_op, inputs)) == [7.0]


def test_empty_cache_attend_only(device, attention_op):
    """No token yet and none written: nothing to see, with a sink only the sink."""
    inputs = attention_inputs(past=0, attend_only=True)
    out, lse = run(device, attention_op, inputs, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    sinks = torch.tensor([0.0, 1.0, -2.0, 3.0])
    out, lse = run(device, attention_op, inputs, return_lse=True, sinks=sinks)
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, sinks.view(1, 4, 1).expand(2, 4, 1), rtol=1e-6, atol=0)


def step_by_step(device, op, inputs, sizes, **options):
    """The new tokens in chunks of these sizes; outputs side by side."""
    arguments = device.arguments(inputs)
    outs, first = [], 0
    for size in sizes:
        chunk = dict(arguments)
        for name in ("query", "key", "value", "cos", "sin"):
            chunk[name] = arguments[name][:, first : first + size]
        chunk["seq_lens"] = arguments["seq_lens"] + first
        outs.append(device.call(op, **chunk, **options).cpu())
        first += size
    return torch.cat(outs, dim=1), arguments


@pytest.mark.parametrize("sizes", [[1] * 13, [5, 8], [12, 1], [1, 3, 9]], ids=str)
def test_chunks_equal_one_prompt(device, attention_op, sizes):
    inputs = attention_inputs(new_tokens=13, past=[4, 0], rotary_dim=64)
    whole, after_whole = step_by_step(device, attention_op, inputs, [13])
    chunks, after_chunks = step_by_step(device, attention_op, inputs, sizes)
    torch.testing.assert_close(chunks, whole, rtol=1e-5, atol=1e-6)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(after_whole[name].nan_to_num(7.0), after_chunks[name].nan_to_num(7.0)), (
            name
        )


def test_ring_equals_a_long_cache(device, attention_op):
    """64 tokens through 12 slots with a window of 10, against a cache that holds them all."""
    long = attention_inputs(new_tokens=64, past=0, max_seq_len=64, rotary_dim=64, window=10)
    expected, _ = step_by_step(device, attention_op, long, [64])
    sizes = [3, 1, 2, 3] * 7 + [1]
    short = long | {
        name: torch.full((2, 2, 12, 64), float("nan")) for name in ("k_cache", "v_cache")
    }
    out, _ = step_by_step(device, attention_op, short, sizes, ring=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_rejected_drafts_leave_no_trace(device, attention_op):
    """Three junk tokens are written, then overwritten: as if they had never been."""
    inputs = attention_inputs(new_tokens=2, past=[6, 11], rotary_dim=64)
    expected = run(device, attention_op, inputs)
    arguments = device.arguments(inputs)
    junk = device.arguments(attention_inputs(seed=50, new_tokens=3, past=[6, 11], rotary_dim=64))
    junk |= {name: arguments[name] for name in ("k_cache", "v_cache")}
    device.call(attention_op, **junk)
    assert torch.equal(device.call(attention_op, **arguments).cpu(), expected)


def test_both_ops_agree(device):
    """Two algorithms, one meaning: also bit for bit in what they write."""
    inputs = attention_inputs(new_tokens=9, past=[3, 7], rotary_dim=64, dtype=torch.bfloat16)
    results = {}
    for op in ("rope_attention_decode", "causal_prefill"):
        arguments = device.arguments(inputs)
        out, lse = device.call(op, **arguments, return_lse=True)
        results[op] = (out.cpu(), lse.cpu(), arguments)
    (decode_out, decode_lse, decode_after), (out, lse, after) = results.values()
    torch.testing.assert_close(out, decode_out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, decode_lse, rtol=1e-5, atol=2e-6)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(after[name].nan_to_num(7.0), decode_after[name].nan_to_num(7.0))


def test_sequences_of_a_batch_do_not_meet(device, attention_op):
    """A batch of lengths gives each sequence what it gets alone."""
    inputs = attention_inputs(batch=4, past=[0, 5, 17, 22], rotary_dim=64)
    together = run(device, attention_op, inputs)
    for sequence in range(4):
        alone = copies(inputs)
        for name in ("query", "key", "value", "k_cache", "v_cache", "seq_lens", "cos", "sin"):
            alone[name] = alone[name][sequence : sequence + 1]
        out = run(device, attention_op, alone)
        torch.testing.assert_close(out[0], together[sequence], rtol=1e-6, atol=1e-6)
