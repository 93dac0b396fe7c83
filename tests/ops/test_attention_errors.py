"""Every wrong call of an attention op: the exact exception, op and argument named, nothing written.

The base call is valid: batch 2, 3 new tokens, 4 query and 2 KV heads, head_dim 8, 12 slots of
which 5 and 9 are filled, RoPE over 6 elements. A case changes it.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from tests.support import errors
from tests.support.attention import attention_inputs, randn
from tests.support.errors import assert_refused, every_other, written


def base(**options):
    shape = {"new_tokens": 3, "head_dim": 8, "max_seq_len": 12, "past": [5, 9], "rotary_dim": 6}
    return attention_inputs(**(shape | options))


changed = partial(errors.changed, base)
each = partial(errors.each, base)


def longs(*values):
    return torch.tensor(values, dtype=torch.int64)


MAX = (1 << 63) - 1
RING = {"ring": True, "window": 4, "past": [5, 40]}

WRONG = {
    # query
    "rank_of_query": (ValueError, "query", each(lambda t: t[0], "query")),
    "float64_query": (TypeError, "query", each(torch.Tensor.double, "query")),
    "integer_query": (TypeError, "query", each(torch.Tensor.int, "query")),
    "query_heads_no_multiple": (ValueError, "query", each(lambda t: t[:, :, :3], "query")),
    "no_query_heads": (ValueError, "query", each(lambda t: t[:, :, :0], "query")),
    "stride_of_query": (ValueError, "query", each(every_other, "query")),
    # key and value
    "rank_of_key": (ValueError, "key", each(lambda t: t[0], "key")),
    "key_and_value_of_another_batch": (ValueError, "key", each(lambda t: t[:1], "key", "value")),
    "fewer_new_keys": (ValueError, "key", each(lambda t: t[:, :2], "key")),
    "fewer_new_values": (ValueError, "value", each(lambda t: t[:, :2], "value")),
    "more_kv_heads_in_key": (ValueError, "key", each(lambda t: torch.cat((t, t), 2), "key")),
    "shorter_head_in_key": (ValueError, "key", each(lambda t: t[..., :7], "key")),
    "shorter_head_in_value": (ValueError, "value", each(lambda t: t[..., :7], "value")),
    "bfloat16_key": (TypeError, "key", each(torch.Tensor.bfloat16, "key")),
    "bfloat16_value": (TypeError, "value", each(torch.Tensor.bfloat16, "value")),
    "float16_key_for_int8_caches": (
        TypeError,
        "key",
        each(torch.Tensor.half, "key", "value", int8=True),
    ),
    "stride_of_key": (ValueError, "key", each(every_other, "key")),
    "stride_of_value": (ValueError, "value", each(every_other, "value")),
    "key_without_value": (ValueError, "value", changed(value=None)),
    "value_without_key": (ValueError, "key", changed(key=None)),
    # caches
    "rank_of_k_cache": (ValueError, "k_cache", each(lambda t: t[0], "k_cache")),
    "rank_of_v_cache": (ValueError, "v_cache", each(lambda t: t[0], "v_cache")),
    "caches_of_another_batch": (ValueError, "k_cache", each(lambda t: t[:1], "k_cache", "v_cache")),
    "shorter_head_in_the_caches": (
        ValueError,
        "k_cache",
        each(lambda t: t[..., :7], "k_cache", "v_cache"),
    ),
    "shorter_v_cache": (ValueError, "v_cache", each(lambda t: t[:, :, :11], "v_cache")),
    "bfloat16_caches": (
        TypeError,
        "k_cache|key",
        each(torch.Tensor.bfloat16, "k_cache", "v_cache"),
    ),
    "bfloat16_v_cache": (TypeError, "v_cache", each(torch.Tensor.bfloat16, "v_cache")),
    "float64_caches": (TypeError, "k_cache", each(torch.Tensor.double, "k_cache", "v_cache")),
    "stride_of_k_cache": (ValueError, "k_cache", each(every_other, "k_cache")),
    "stride_of_v_cache": (ValueError, "v_cache", each(every_other, "v_cache")),
    "k_cache_expanded_over_the_batch": (
        ValueError,
        "k_cache",
        each(lambda t: t[:1].expand_as(t), "k_cache"),
    ),
    "v_cache_expanded_over_the_heads": (
        ValueError,
        "v_cache",
        each(lambda t: t[:, :1].expand_as(t), "v_cache"),
    ),
    "v_cache_of_overlapping_slots": (
        ValueError,
        "v_cache",
        each(lambda t: t.as_strided((2, 2, 12, 8), (200, 100, 4, 1)), "v_cache"),
    ),
    # int8 scales
    "int8_caches_without_scales": (
        ValueError,
        "k_scale",
        lambda: base(int8=True) | {"k_scale": None, "v_scale": None},
    ),
    "int8_caches_without_v_scale": (
        ValueError,
        "v_scale",
        lambda: base(int8=True) | {"v_scale": None},
    ),
    "scales_beside_float_caches": (
        TypeError,
        "k_scale",
        changed(k_scale=torch.ones(2, 2, 12), v_scale=torch.ones(2, 2, 12)),
    ),
    "scales_for_11_of_12_slots": (
        ValueError,
        "k_scale",
        each(lambda t: t[..., :11], "k_scale", int8=True),
    ),
    "empty_v_scale": (ValueError, "v_scale", each(lambda t: t[:0], "v_scale", int8=True)),
    "bfloat16_k_scale": (TypeError, "k_scale", each(torch.Tensor.bfloat16, "k_scale", int8=True)),
    "k_scale_expanded": (
        ValueError,
        "k_scale",
        each(lambda t: t[:1].expand_as(t), "k_scale", int8=True),
    ),
    # seq_lens
    "int32_seq_lens": (TypeError, "seq_lens", each(torch.Tensor.int, "seq_lens")),
    "float_seq_lens": (TypeError, "seq_lens", each(torch.Tensor.float, "seq_lens")),
    "boolean_seq_lens": (TypeError, "seq_lens", each(torch.Tensor.bool, "seq_lens")),
    "seq_lens_of_three": (ValueError, "seq_lens", changed(seq_lens=longs(5, 9, 1))),
    "seq_lens_of_one": (ValueError, "seq_lens", changed(seq_lens=longs(5))),
    "rank_of_seq_lens": (ValueError, "seq_lens", each(lambda t: t.view(2, 1), "seq_lens")),
    "negative_length": (ValueError, "seq_lens", changed(seq_lens=longs(5, -1))),
    "very_negative_length": (ValueError, "seq_lens", changed(seq_lens=longs(-MAX - 1, 5))),
    "overflow_by_one": (ValueError, "seq_lens", changed(seq_lens=longs(5, 10))),
    "overflow_of_all": (ValueError, "seq_lens", changed(seq_lens=torch.tensor(12))),
    "overflow_of_an_integer": (ValueError, "seq_lens", changed(seq_lens=longs(5, MAX))),
    "more_tokens_than_slots": (
        ValueError,
        "seq_lens",
        lambda: base(new_tokens=13, past=0, max_seq_len=12),
    ),
    "attend_only_past_the_cache": (
        ValueError,
        "seq_lens",
        lambda: base(attend_only=True) | {"seq_lens": longs(5, 13)},
    ),
    "negative_length_in_a_ring": (
        ValueError,
        "seq_lens",
        lambda: base(**RING) | {"seq_lens": longs(-1, 5)},
    ),
    "position_near_2_to_63_in_a_ring": (
        ValueError,
        "seq_lens",
        lambda: base(**RING) | {"seq_lens": longs(5, MAX - 1)},
    ),
    # cos and sin
    "cos_without_sin": (ValueError, "sin", changed(sin=None)),
    "sin_without_cos": (ValueError, "cos", changed(cos=None)),
    "rank_of_cos": (ValueError, "cos", each(lambda t: t[0], "cos", "sin")),
    "rank_of_sin": (ValueError, "sin", each(lambda t: t[0], "sin")),
    "cos_of_another_batch": (
        ValueError,
        "cos",
        each(lambda t: torch.cat((t, t[:1])), "cos", "sin"),
    ),
    "fewer_tokens_in_cos": (ValueError, "cos", each(lambda t: t[:, :2], "cos", "sin")),
    "odd_rotary_dim": (ValueError, "cos", each(lambda t: t[..., :5], "cos", "sin")),
    "rotary_dim_wider_than_the_head": (
        ValueError,
        "cos",
        each(lambda t: torch.cat((t, t), -1), "cos", "sin"),
    ),
    "shorter_sin": (ValueError, "sin", each(lambda t: t[..., :4], "sin")),
    "sin_for_one_of_two_sequences": (ValueError, "sin", each(lambda t: t[:1], "sin")),
    "float64_cos": (TypeError, "cos", each(torch.Tensor.double, "cos", "sin")),
    "bfloat16_cos_beside_a_float32_query": (
        TypeError,
        "cos",
        each(torch.Tensor.bfloat16, "cos", "sin"),
    ),
    # mask
    "float_mask": (TypeError, "attn_mask", changed(attn_mask=torch.zeros(2, 1, 3, 12))),
    "uint8_mask": (
        TypeError,
        "attn_mask",
        changed(attn_mask=torch.ones(2, 1, 3, 12, dtype=torch.uint8)),
    ),
    "rank_of_the_mask": (ValueError, "attn_mask", changed(attn_mask=torch.ones(2, 12).bool())),
    "mask_of_another_batch": (
        ValueError,
        "attn_mask",
        changed(attn_mask=torch.ones(3, 1, 3, 12).bool()),
    ),
    "mask_by_kv_head": (ValueError, "attn_mask", changed(attn_mask=torch.ones(2, 2, 3, 12).bool())),
    "mask_of_one_token": (
        ValueError,
        "attn_mask",
        changed(attn_mask=torch.ones(2, 1, 1, 12).bool()),
    ),
    "mask_one_position_short": (
        ValueError,
        "attn_mask",
        changed(attn_mask=torch.ones(2, 1, 3, 11).bool()),
    ),
    "mask_longer_than_a_ring": (
        ValueError,
        "attn_mask",
        lambda: base(**RING) | {"attn_mask": torch.ones(2, 1, 3, 13).bool()},
    ),
    "mask_shorter_than_a_ring": (
        ValueError,
        "attn_mask",
        lambda: base(**RING) | {"attn_mask": torch.ones(2, 1, 3, 11).bool()},
    ),
    # starts
    "int32_kv_start": (TypeError, "kv_start", changed(kv_start=longs(0, 1).int())),
    "kv_start_of_three": (ValueError, "kv_start", changed(kv_start=longs(0, 1, 2))),
    "kv_start_for_all": (ValueError, "kv_start", changed(kv_start=torch.tensor(1))),
    "int32_query_start": (TypeError, "query_start", changed(query_start=longs(0, 1).int())),
    "query_start_of_three": (ValueError, "query_start", changed(query_start=longs(0, 1, 2))),
    "rank_of_query_start": (ValueError, "query_start", changed(query_start=longs(0, 1).view(2, 1))),
    # options
    "window_of_none": (ValueError, "window", changed(window=0)),
    "negative_window": (ValueError, "window", changed(window=-1)),
    "ring_without_window": (ValueError, "window", changed(ring=True)),
    "ring_too_small_for_its_window": (
        ValueError,
        "window",
        lambda: base(**(RING | {"window": 11})),
    ),
    "window_of_a_ring_overflows": (ValueError, "window", lambda: base(**(RING | {"window": MAX}))),
    "ring_that_lost_what_is_asked": (
        ValueError,
        "query_start",
        lambda: base(**RING) | {"query_start": longs(5, 20)},
    ),
    "softcap_of_zero": (ValueError, "softcap", changed(softcap=0.0)),
    "negative_softcap": (ValueError, "softcap", changed(softcap=-3.0)),
    "softcap_is_no_number": (ValueError, "softcap", changed(softcap=float("nan"))),
    "softcap_that_is_zero_as_float32": (ValueError, "softcap", changed(softcap=1e-300)),
    "softcap_past_float32": (ValueError, "softcap", changed(softcap=1e300)),
    "scale_past_float32": (ValueError, "scale", changed(scale=-1e300)),
    **{
        f"no_{name}": (TypeError, f"{name} must be a tensor, got None", changed(**{name: None}))
        for name in ("query", "k_cache", "v_cache", "seq_lens")
    },
    "scale_is_no_number": (ValueError, "scale", changed(scale=float("nan"))),
    "sinks_by_kv_head": (ValueError, "sinks", changed(sinks=torch.zeros(2))),
    "rank_of_sinks": (ValueError, "sinks", changed(sinks=torch.zeros(4, 1))),
    "integer_sinks": (TypeError, "sinks", changed(sinks=torch.zeros(4).int())),
    # devices
    **{
        f"meta_{name}": (TypeError, rf"{name}|query|k_cache", each(lambda t: t.to("meta"), name))
        for name in ("query", "key", "value", "k_cache", "v_cache", "seq_lens", "cos", "sin")
    },
    "meta_mask": (
        TypeError,
        "attn_mask",
        changed(attn_mask=torch.ones(2, 1, 3, 12, device="meta").bool()),
    ),
    "meta_sinks": (TypeError, "sinks", changed(sinks=torch.zeros(4, device="meta"))),
    "meta_kv_start": (TypeError, "kv_start", changed(kv_start=longs(0, 1).to("meta"))),
    "meta_query_start": (TypeError, "query_start", changed(query_start=longs(0, 1).to("meta"))),
    "meta_k_scale": (
        TypeError,
        "k_scale|k_cache",
        each(lambda t: t.to("meta"), "k_scale", int8=True),
    ),
}


@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("name", WRONG)
def test_refuses(device_family, attention_op, name, return_lse):
    exception, argument, make = WRONG[name]
    arguments = device_family.arguments(make())
    assert_refused(
        lambda: device_family.call(attention_op, **arguments, return_lse=return_lse),
        exception,
        attention_op,
        argument,
        watched=written(arguments),
    )


@pytest.mark.parametrize("exception_before", ["key", "cos"])
def test_valid_after_an_error(device_family, attention_op, exception_before):
    """A refused call leaves nothing behind: the same call, mended, gives what it should."""
    arguments = device_family.arguments(base())
    expected = device_family.call(attention_op, **device_family.arguments(base()))
    with pytest.raises(ValueError):
        device_family.call(attention_op, **(arguments | {exception_before: None}))
    assert torch.equal(device_family.call(attention_op, **arguments), expected)


def test_refuses_one_tensor_as_both_caches(device_family, attention_op):
    arguments = device_family.arguments(base())
    arguments["v_cache"] = arguments["k_cache"]
    assert_refused(
        lambda: device_family.call(attention_op, **arguments),
        ValueError,
        attention_op,
        "v_cache",
        watched=written(arguments),
    )


def test_refuses_caches_that_are_shifted_views(device_family, attention_op):
    """Slots 0..11 and 1..12 of one buffer."""
    arguments = device_family.arguments(base())
    buffer = device_family.tensor(randn(0, 2, 2, 13, 8))
    arguments |= {"k_cache": buffer[:, :, :12], "v_cache": buffer[:, :, 1:]}
    assert_refused(
        lambda: device_family.call(attention_op, **arguments),
        ValueError,
        attention_op,
        "v_cache",
        watched=written(arguments),
    )


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_refuses_new_rows_that_lie_in_the_cache(device_family, attention_op, name):
    """Written while they are read."""
    arguments = device_family.arguments(base(num_heads=2, num_kv_heads=2))
    arguments[name] = arguments["k_cache"][:, :, 4:7].transpose(1, 2)
    assert_refused(
        lambda: device_family.call(attention_op, **arguments),
        ValueError,
        attention_op,
        name,
        watched=written(arguments),
    )


@pytest.mark.parametrize(
    "name", ["query", "key", "value", "k_cache", "v_cache", "cos", "sin", "sinks"]
)
def test_refuses_gradients(device_family, attention_op, name):
    arguments = device_family.arguments(base(sinks=torch.zeros(4)))
    arguments[name].requires_grad_()
    message = assert_refused(
        lambda: device_family.call(attention_op, **arguments),
        RuntimeError,
        attention_op,
        name,
        watched=written(arguments),
    )
    assert "inference only" in message
    with torch.no_grad():
        assert device_family.call(attention_op, **arguments).isfinite().all()


@pytest.mark.parametrize("name", ["query", "value"])
def test_refuses_tangents(device_family, attention_op, name):
    """Forward-mode differentiation lost them without a word."""
    arguments = device_family.arguments(base())
    with forward_ad.dual_level(), torch.no_grad():
        tangent = torch.ones_like(arguments[name])
        arguments[name] = forward_ad.make_dual(arguments[name], tangent)
        assert_refused(
            lambda: device_family.call(attention_op, **arguments), RuntimeError, attention_op, name
        )


def test_runs_in_inference_mode(device_family, attention_op):
    expected = device_family.call(attention_op, **device_family.arguments(base()))
    with torch.inference_mode():
        out = device_family.call(attention_op, **device_family.arguments(base()))
    assert torch.equal(out, expected)
