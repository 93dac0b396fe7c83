"""Random calls of the attention ops and of kv_cache_update_, valid and wrong."""

from __future__ import annotations

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st

from fasttps.reference import attention as reference_attention
from tests.ops.test_kv_cache_update import check_update
from tests.support.accuracy import assert_accurate
from tests.support.attention import (
    attention_in_float64,
    attention_in_same_dtype,
    attention_inputs,
    randn,
    without_key,
)
from tests.support.attention_checks import check_attention
from tests.support.errors import written
from tests.support.fuzz import (
    assert_close_to_twin,
    assert_refused_or_right,
    devices,
    dtypes,
    kernels,
    many,
    seeds,
    several_strides,
    some,
    spoiled,
    twin,
)

attention_ops = st.sampled_from(["rope_attention_decode", "causal_prefill"])
head_dims = st.integers(1, 74).map(lambda n: n if n <= 70 else (80, 96, 128, 256)[n - 71])
rooms = st.integers(0, 73).map(lambda n: n if n <= 70 else (255, 256, 300)[n - 71])
CACHE_ARGUMENTS = ("k_cache", "v_cache", "key", "value", "seq_lens", "ring", "k_scale", "v_scale")


@st.composite
def attention_calls(draw, small=False):
    """Any valid call: sizes, lengths, strides and options in all combinations."""
    batch, num_kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    new_tokens = draw(st.integers(1, 4 if small else 23))
    num_heads = num_kv_heads * draw(st.integers(1, 5))
    head_dim = draw(st.integers(1, 17) if small else head_dims)
    room = draw(st.integers(0, 9) if small else rooms)
    max_seq_len = new_tokens + room
    dtype = draw(dtypes)
    attend_only = draw(st.booleans())
    options = {"attend_only": attend_only, "int8": draw(st.booleans())}
    options["transposed"] = draw(st.booleans())

    lengths = st.integers(0, max_seq_len if attend_only else room)
    if draw(st.booleans()):
        options |= {"ring": True, "window": draw(st.integers(1, room + 1))}
        lengths = st.one_of(st.integers(0, 4 * max_seq_len), st.just((1 << 40) + 3))
    elif draw(st.booleans()):
        options["window"] = draw(st.integers(1, 2 * max_seq_len))
    per_sequence = st.lists(lengths, min_size=batch, max_size=batch)
    past = draw(st.one_of(lengths, per_sequence))

    if draw(st.booleans()) and head_dim >= 2:
        options["rotary_dim"] = 2 * draw(st.integers(1, head_dim // 2))
        options["interleaved"] = draw(st.booleans())
    if draw(st.booleans()) and not options.get("ring"):
        start = st.integers(-new_tokens - 2, max_seq_len + 5)
        starts = st.lists(start, min_size=batch, max_size=batch)
        options["query_start"] = torch.tensor(draw(st.one_of(start, starts)))
    if draw(st.booleans()):
        starts = st.lists(st.integers(-2, max_seq_len + 3), min_size=batch, max_size=batch)
        options["kv_start"] = torch.tensor(draw(starts))
    if draw(st.booleans()):
        shape = (
            draw(st.sampled_from([1, batch])),
            draw(st.sampled_from([1, num_heads])),
            new_tokens,
            max_seq_len if options.get("ring") else max_seq_len + draw(st.integers(0, 3)),
        )
        share = draw(st.sampled_from([-2.0, 0.0, 1.0]))
        mask = randn(draw(seeds), *shape) > share
        how = draw(st.sampled_from(["dense", "transposed", "expanded"]))
        if how == "transposed":
            mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
        elif how == "expanded":
            mask = mask[:1, :1].expand(batch, num_heads, -1, -1)
        options["attn_mask"] = mask
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.02, 0.3, 1.0]))
    if draw(st.booleans()):
        options["sinks"] = 2 * randn(draw(seeds), num_heads, dtype=draw(dtypes))
    inputs = attention_inputs(
        seed=draw(seeds),
        dtype=dtype,
        batch=batch,
        new_tokens=new_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_seq_len=max_seq_len,
        past=past,
        **options,
    )
    if "cos" in inputs:
        if draw(st.booleans()):
            inputs |= {name: inputs[name].to(dtype) for name in ("cos", "sin")}
        inputs |= {name: several_strides(draw, inputs[name], (0, 1, 2)) for name in ("cos", "sin")}
    for name in ("query", "key", "value"):
        if inputs[name] is not None:
            inputs[name] = several_strides(draw, inputs[name], (0, 1, 2))
    if draw(st.booleans()):
        poison_hidden_slots(inputs)
    return inputs


def poison_hidden_slots(inputs):
    """NaN in every row of the caches that no query may see."""
    batch, new_tokens = inputs["query"].shape[:2]
    num_kv_heads, max_seq_len = inputs["k_cache"].shape[1:3]
    seq_lens = inputs["seq_lens"].expand(batch)
    kv_len = seq_lens + (0 if inputs["key"] is None else new_tokens)
    query_start = inputs.get("query_start")
    visible = reference_attention.visible_slots(
        kv_len,
        seq_lens if query_start is None else query_start.expand(batch),
        new_tokens,
        max_seq_len,
        ring=inputs.get("ring", False),
        window=inputs.get("window"),
        kv_start=inputs.get("kv_start"),
    )
    if inputs.get("attn_mask") is not None:
        visible = visible & inputs["attn_mask"][..., :max_seq_len]
    visible = visible.expand(batch, inputs["query"].size(2), -1, -1)
    hidden = ~visible.unflatten(1, (num_kv_heads, -1)).any(2).any(2)
    for name in ("k", "v"):
        if f"{name}_scale" in inputs:
            inputs[f"{name}_scale"].masked_fill_(hidden, float("nan"))
        else:
            inputs[f"{name}_cache"].masked_fill_(hidden.unsqueeze(-1), float("nan"))


def test_valid_attention():
    @many
    @given(devices, attention_ops, attention_calls())
    def check(device, op, inputs):
        with device.active():
            check_attention(device, op, inputs)

    check()


def test_valid_attention_with_lse():
    """lse is a float32 sum of exponentials: as exact as its largest score."""

    @many
    @given(devices, attention_ops, attention_calls(small=True))
    def check(device, op, inputs):
        with device.active():
            arguments = device.arguments(inputs)
            out, lse = device.call(op, **arguments, return_lse=True)
        assert out.dtype == lse.dtype == torch.float32
        caches = {name: arguments[name] for name in arguments if name[1:] in ("_cache", "_scale")}
        judged = without_key(inputs, caches) if "k_scale" in inputs else inputs
        exact_out, exact = attention_in_float64(judged)
        assert_accurate(out, exact_out, attention_in_same_dtype(judged))
        assert torch.equal(lse.isfinite(), exact.isfinite())
        finite = exact.isfinite()
        if inputs["query"].dtype == torch.float32:
            torch.testing.assert_close(lse.double()[finite], exact[finite], rtol=1e-5, atol=2e-5)
        else:
            torch.testing.assert_close(lse.double()[finite], exact[finite], rtol=2e-2, atol=5e-2)

    check()


def test_valid_updates():
    @many
    @given(devices, attention_calls().filter(lambda inputs: inputs["key"] is not None))
    def check(device, inputs):
        with device.active():
            check_update(device, {name: inputs[name] for name in CACHE_ARGUMENTS if name in inputs})

    check()


def check_spoiled(device, op, what, call):
    """Refused with nothing written, or what the twin says, with the twin's caches."""
    arguments, expected = device.arguments(call), copy.deepcopy(call)

    def compare(result):
        assert (
            "stride 0" not in what
            or what.split(":")[0] not in ("k_cache", "v_cache")
            or (call.get("key") is None)
        ), f"{what}: written through shared memory"
        right = twin(op, expected)
        if result is not None:
            assert_close_to_twin(result, right)
        for ours, theirs in zip(written(arguments), written(expected)):
            if ours.dtype == torch.int8:
                assert (ours.int() - theirs.int()).abs().max() <= 1, what
            else:
                assert_close_to_twin(ours, theirs)

    with device.active():
        assert_refused_or_right(op, what, arguments, written(arguments), compare)


def test_spoiled_attention():
    @some
    @given(kernels, attention_ops, attention_calls(small=True), st.data())
    def check(device, op, inputs, data):
        what, call = spoiled(data.draw, inputs)
        check_spoiled(device, op, what, call)

    check()


def test_spoiled_updates():
    @some
    @given(
        kernels,
        attention_calls(small=True).filter(lambda inputs: inputs["key"] is not None),
        st.data(),
    )
    def check(device, inputs, data):
        inputs = {name: inputs[name] for name in CACHE_ARGUMENTS if name in inputs}
        what, call = spoiled(data.draw, inputs)
        check_spoiled(device, "kv_cache_update_", what, call)

    check()


@st.composite
def empty_attention_calls(draw):
    """Sizes of which one is zero."""
    inputs = draw(attention_calls(small=True))
    names = ("query", "key", "value")
    if draw(st.booleans()):
        inputs |= {n: inputs[n][:, :0] for n in names if inputs[n] is not None}
        inputs |= {n: inputs[n][:, :0] for n in ("cos", "sin") if n in inputs}
        if "attn_mask" in inputs:
            inputs["attn_mask"] = inputs["attn_mask"][:, :, :0]
        return inputs
    names += ("k_cache", "v_cache", "k_scale", "v_scale", "kv_start", "cos", "sin", "attn_mask")
    inputs |= {n: inputs[n][:0] for n in names if inputs.get(n) is not None}
    for name in ("seq_lens", "query_start"):
        if name in inputs and inputs[name].dim() == 1:
            inputs[name] = inputs[name][:0]
    return inputs


def test_no_tokens_and_no_sequences():
    @some
    @given(kernels, attention_ops, empty_attention_calls())
    def check(device, op, inputs):
        with device.active():
            arguments = device.arguments(inputs)
            out, lse = device.call(op, **arguments, return_lse=True)
            batch, new_tokens, num_heads, _ = inputs["query"].shape
            assert out.shape == inputs["query"].shape and out.numel() == 0
            assert lse.shape == (batch, num_heads, new_tokens)
            for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
                if name in inputs:
                    torch.testing.assert_close(
                        arguments[name], inputs[name], rtol=0, atol=0, equal_nan=True
                    )

    check()
