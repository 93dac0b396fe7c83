"""RoPE inside the attention ops: rotated numbers worked out by hand, read back from the cache."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.attention import attention_inputs, randn, rope_tables
from tests.support.attention_checks import run

# x = 1..8 at position 1, theta 1e4.
HALVES_WIDTH_4 = [-1.984111, 1.959901, 2.462378, 4.019800, 5, 6, 7, 8]
INTERLEAVED = [-1.142640, 1.922076, 2.585679, 4.279517, 4.939751, 6.049699, 6.991997, 8.006996]


def rotated_key(device, op, rotary_dim, interleaved, position=1, dtype=torch.float32):
    """The cache row that x = 1..8 becomes, and the query's, seen through a score."""
    cos, sin = rope_tables(torch.tensor([[position]]), rotary_dim, interleaved)
    x = torch.arange(1.0, 9.0, dtype=dtype).view(1, 1, 1, 8)
    cache = torch.zeros(1, 1, 4, 8, dtype=dtype)
    arguments = device.arguments(
        {
            "query": x,
            "key": x,
            "value": x,
            "k_cache": cache,
            "v_cache": cache,
            "seq_lens": torch.tensor(2),
            "cos": cos,
            "sin": sin,
            "interleaved": interleaved,
        }
    )
    device.call(op, **arguments)
    return arguments["k_cache"][0, 0, 2].cpu()


@pytest.mark.parametrize(
    "rotary_dim, interleaved, expected", [(4, False, HALVES_WIDTH_4), (8, True, INTERLEAVED)]
)
def test_rotated_key_of_a_worked_example(device, attention_op, rotary_dim, interleaved, expected):
    """Partial RoPE pairs within rotary_dim, not across the head, and copies the rest."""
    row = rotated_key(device, attention_op, rotary_dim, interleaved)
    torch.testing.assert_close(row, torch.tensor(expected), rtol=0, atol=6e-7 * 8)
    assert torch.equal(row[rotary_dim:], torch.arange(1.0, 9.0)[rotary_dim:])


def test_rotated_key_is_rounded_once(device, attention_op):
    """In bfloat16 the products stay in float32 until the cache."""
    row = rotated_key(device, attention_op, 4, False, dtype=torch.bfloat16)
    assert torch.equal(row, torch.tensor(HALVES_WIDTH_4).bfloat16())


def test_query_rotates_like_the_key(device, attention_op):
    """A score depends on the distance alone: rotating both by the same angle changes nothing."""
    inputs = attention_inputs(past=0, batch=1, new_tokens=6, max_seq_len=6)
    still = run(device, attention_op, inputs)
    for interleaved in (False, True):
        cos, sin = rope_tables(torch.full((1, 6), 123.0), 64, interleaved)
        turned = inputs | {"cos": cos, "sin": sin, "interleaved": interleaved}
        out = run(device, attention_op, turned)
        torch.testing.assert_close(out, still, rtol=1e-4, atol=1e-5)


def test_scores_depend_on_the_distance(device, attention_op):
    """Prompt at positions 0.. and at 1000..: the same output."""
    inputs = attention_inputs(past=0, new_tokens=6, batch=1, max_seq_len=6)
    outs = []
    for first in (0, 1000):
        cos, sin = rope_tables(first + torch.arange(6).view(1, 6), 64)
        outs.append(run(device, attention_op, inputs | {"cos": cos, "sin": sin}))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", [(256, 257), (4096, 4097), (15936, 15962)])
def test_neighbouring_positions_keep_apart_in_bfloat16(device, attention_op, positions):
    """float32 tables beside a bfloat16 query, under autocast: rounded to bfloat16 first, 257 and
    256 would be one angle."""
    rows = []
    for position in positions:
        with torch.autocast("cpu", torch.bfloat16):
            rows.append(rotated_key(device, attention_op, 8, False, position, torch.bfloat16))
        angle = torch.tensor([position], dtype=torch.float64)
        expected = (1 * angle.cos() - 5 * angle.sin()).bfloat16()
        assert abs(float(rows[-1][0] - expected)) <= 0.016 * abs(float(expected))
    assert not torch.equal(rows[0], rows[1])
    assert math.isclose(rope_tables(torch.tensor([15962]), 8)[0][0, 0], -0.908016, abs_tol=1e-6)


def test_autocast_changes_nothing(device, attention_op):
    inputs = attention_inputs(past=5, rotary_dim=64, sinks=torch.zeros(4))
    expected = run(device, attention_op, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(device, attention_op, inputs), expected)


def test_tables_per_sequence(device, attention_op):
    """Left padding sets the positions of sequences apart from their slots."""
    inputs = attention_inputs(past=5, new_tokens=2)
    tables = [rope_tables(torch.tensor([[7, 8], [2, 3]])[b : b + 1], 64) for b in range(2)]
    cos, sin = (torch.cat(parts) for parts in zip(*tables))
    together = run(device, attention_op, inputs | {"cos": cos, "sin": sin})
    for sequence, (cos, sin) in enumerate(tables):
        out = run(device, attention_op, inputs | {"cos": cos, "sin": sin})
        assert torch.equal(out[sequence], together[sequence])


def test_cos_and_sin_are_applied_as_given(device, attention_op):
    """Scaled RoPE variants put a factor into cos and sin, and the halves may differ."""
    inputs = attention_inputs(past=0, batch=1, num_heads=1, num_kv_heads=1)
    cos, sin = randn(11, 1, 1, 64), randn(12, 1, 1, 64)
    arguments = device.arguments(inputs | {"cos": cos, "sin": sin})
    device.call(attention_op, **arguments)
    key = inputs["key"][0, 0, 0]
    expected = key * cos[0, 0] + torch.cat((-key[32:], key[:32])) * sin[0, 0]
    row = arguments["k_cache"][0, 0, 0].cpu()
    torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)
