"""Random arguments of every kind, judged as the tests with chosen ones are.

FASTTPS_FUZZ_EXAMPLES: how many per test and device (25 if not set); the same ones in every run.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops.test_gate_up_silu_mlp import check_mlp, weights_of
from tests.ops.test_kv_cache_update import check_update
from tests.support.attention import attention_inputs, randn
from tests.support.attention_checks import check_attention

few = settings(
    max_examples=int(os.environ.get("FASTTPS_FUZZ_EXAMPLES", "25")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
seeds = st.integers(0, 1000)
sizes = st.integers(1, 70)


@st.composite
def attention_arguments(draw):
    """Any valid call: sizes, lengths, strides and options in all combinations."""
    batch, num_kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    new_tokens = draw(st.integers(1, 23))
    num_heads = num_kv_heads * draw(st.integers(1, 5))
    head_dim = draw(sizes)
    room = draw(st.integers(0, 70))
    max_seq_len = new_tokens + room
    attend_only = draw(st.booleans())
    options = {"attend_only": attend_only, "int8": draw(st.booleans())}
    options["transposed"] = draw(st.booleans())

    lengths = st.integers(0, max_seq_len if attend_only else room)
    if draw(st.booleans()):
        options |= {"ring": True, "window": draw(st.integers(1, room + 1))}
        lengths = st.integers(0, 4 * max_seq_len)
    elif draw(st.booleans()):
        options["window"] = draw(st.integers(1, 2 * max_seq_len))
    per_sequence = st.lists(lengths, min_size=batch, max_size=batch)
    past = draw(st.one_of(lengths, per_sequence))

    if draw(st.booleans()) and head_dim >= 2:
        options["rotary_dim"] = 2 * draw(st.integers(1, head_dim // 2))
        options["interleaved"] = draw(st.booleans())
    if draw(st.booleans()) and not options.get("ring"):
        start = draw(st.integers(-new_tokens - 2, max_seq_len + 5))
        options["query_start"] = torch.tensor(start)
    if draw(st.booleans()):
        starts = st.lists(st.integers(0, max_seq_len + 3), min_size=batch, max_size=batch)
        options["kv_start"] = torch.tensor(draw(starts))
    if draw(st.booleans()):
        shape = (
            draw(st.sampled_from([1, batch])),
            draw(st.sampled_from([1, num_heads])),
            new_tokens,
            max_seq_len if options.get("ring") else max_seq_len + draw(st.integers(0, 3)),
        )
        share = draw(st.sampled_from([-2.0, 0.0, 1.0]))
        options["attn_mask"] = randn(draw(seeds), *shape) > share
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.02, 0.3, 1.0]))
    if draw(st.booleans()):
        options["sinks"] = 2 * randn(draw(seeds), num_heads)
    return attention_inputs(
        seed=draw(seeds),
        dtype=draw(dtypes),
        batch=batch,
        new_tokens=new_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_seq_len=max_seq_len,
        past=past,
        **options,
    )


def test_attention(device, attention_op):
    @few
    @given(attention_arguments())
    def check(inputs):
        check_attention(device, attention_op, inputs)

    check()


def test_kv_cache_update(device):
    @few
    @given(attention_arguments().filter(lambda inputs: inputs["key"] is not None))
    def check(inputs):
        names = ("k_cache", "v_cache", "key", "value", "seq_lens", "ring", "k_scale", "v_scale")
        check_update(device, {name: inputs[name] for name in names if name in inputs})

    check()


def test_mlp(device):
    @few
    @given(dtypes, sizes, sizes, st.integers(1, 23), st.booleans(), seeds, st.data())
    def check(dtype, hidden_size, intermediate_size, tokens, biased, seed, data):
        activation = data.draw(st.sampled_from(["silu", "gelu", "gelu_tanh"]))
        weights, biases = weights_of(hidden_size, intermediate_size, dtype, seed, biased)
        # Of a handful of numbers, PyTorch may have rounded every one well by luck.
        tokens = max(tokens, -(-64 // hidden_size))
        x = randn(seed, tokens, hidden_size, dtype=dtype)
        check_mlp(device, x, weights, biases, activation)

    check()
