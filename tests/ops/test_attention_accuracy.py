"""Both attention ops against float64, over dtypes, sizes, strides and options.

Every case has RoPE where it does not say otherwise, sequences of different lengths, and NaN in
the slots that hold no token.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.attention import attention_inputs, randn
from tests.support.attention_checks import check_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF_AND_FULL = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.mark.parametrize("head_dim", [1, 8, 20, 64, 80, 96, 128, 256])
def test_head_dims(device, attention_op, dtype, head_dim):
    rotary_dim = head_dim // 2 * 2
    check_attention(
        device,
        attention_op,
        attention_inputs(
            dtype=dtype, head_dim=head_dim, rotary_dim=rotary_dim, past=[21, 5], new_tokens=2
        ),
    )


@pytest.mark.parametrize(
    "num_heads, num_kv_heads", [(1, 1), (3, 1), (4, 4), (9, 3), (14, 2), (32, 2)]
)
def test_groups(device, attention_op, dtype, num_heads, num_kv_heads):
    check_attention(
        device,
        attention_op,
        attention_inputs(
            dtype=dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=32,
            rotary_dim=32,
            past=[18, 11],
        ),
    )


@pytest.mark.parametrize("new_tokens", range(1, 24))
def test_new_tokens(device, attention_op, new_tokens):
    check_attention(
        device,
        attention_op,
        attention_inputs(
            dtype=torch.bfloat16,
            new_tokens=new_tokens,
            head_dim=32,
            rotary_dim=32,
            past=[17, 0],
            max_seq_len=40,
        ),
    )


@pytest.mark.parametrize("past", [0, 1, 2, 15, 16, 30, 31, 32, 63, 64, 127, 255, 256, 511, 1023])
def test_cache_lengths(device, attention_op, past):
    """At and around the sizes that blocks have: with the new token, one less and one more."""
    for dtype in HALF_AND_FULL:
        check_attention(
            device,
            attention_op,
            attention_inputs(
                dtype=dtype, batch=1, head_dim=64, rotary_dim=64, past=past, max_seq_len=past + 3
            ),
        )


OPTIONS = {
    "no_rope": {"rotary_dim": 0},
    "interleaved": {"interleaved": True},
    "partial_rope": {"rotary_dim": 24},
    "partial_rope_odd_half": {"rotary_dim": 10},
    "partial_interleaved": {"rotary_dim": 18, "interleaved": True},
    "attend_only": {"attend_only": True, "rotary_dim": 0},
    "attend_only_rotates_the_query": {"attend_only": True},
    "not_causal": {"attend_only": True, "query_start": torch.tensor([21, 10])},
    "query_start_before": {"query_start": torch.tensor([3, 0])},
    "query_start_sees_nothing_first": {"query_start": torch.tensor([-2, -1])},
    "window": {"window": 9},
    "window_of_one": {"window": 1},
    "window_wider_than_the_cache": {"window": 1000},
    "left_padding": {"kv_start": torch.tensor([4, 12])},
    "left_padding_hides_all": {"kv_start": torch.tensor([0, 100])},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.31},
    "sinks": {"sinks": torch.tensor([0.0, 2.0, -3.0, 0.5])},
    "sinks_and_window": {"sinks": torch.tensor([0.0, 2.0, -3.0, 0.5]), "window": 4},
    "ring": {"ring": True, "window": 12, "past": [90, 31]},
    "ring_not_full": {"ring": True, "window": 12, "past": [3, 0]},
    "ring_far_along": {"ring": True, "window": 12, "past": [(1 << 40) + 3, 1 << 33]},
    "ring_wraps_in_the_new_tokens": {"ring": True, "window": 20, "past": [23, 22]},
    "everything": {
        "interleaved": True,
        "rotary_dim": 18,
        "window": 11,
        "kv_start": torch.tensor([13, 2]),
        "softcap": 4.0,
        "scale": 0.2,
        "sinks": torch.tensor([0.0, 1.0, -1.0, 0.5]),
    },
}


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device, attention_op, dtype, name, int8):
    options = {"past": [20, 9], "new_tokens": 3, "head_dim": 40, "rotary_dim": 40} | OPTIONS[name]
    check_attention(device, attention_op, attention_inputs(dtype=dtype, int8=int8, **options))


MASKS = {
    "whole": (2, 4, 3, 24),
    "one_for_all_heads": (2, 1, 3, 24),
    "one_for_all_sequences": (1, 4, 3, 24),
    "as_long_as_the_longest_sequence": (1, 1, 3, 23),
    "longer_than_the_cache": (1, 1, 3, 31),
}


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(device, attention_op, name, transposed):
    shape = MASKS[name]
    if transposed:
        mask = (randn(8, *reversed(shape)) > 0.2).permute(3, 2, 1, 0)
    else:
        mask = randn(8, *shape) > 0.2
    for dtype in HALF_AND_FULL:
        inputs = attention_inputs(
            dtype=dtype, past=[20, 9], new_tokens=3, rotary_dim=64, attn_mask=mask
        )
        check_attention(device, attention_op, inputs)


def test_mask_of_a_ring_is_by_slot(device, attention_op):
    mask = randn(8, 2, 1, 2, 24) > 0
    inputs = attention_inputs(
        past=[50, 24], new_tokens=2, attn_mask=mask, ring=True, window=20, rotary_dim=64
    )
    check_attention(device, attention_op, inputs)


def test_expanded_mask(device, attention_op):
    """A mask that repeats one row by stride 0."""
    mask = (randn(8, 1, 1, 1, 24) > 0).expand(2, 4, 3, 24)
    check_attention(
        device, attention_op, attention_inputs(past=[20, 9], new_tokens=3, attn_mask=mask)
    )


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("head_dim", [1, 20, 64, 96])
def test_transposed_views(device, attention_op, dtype, head_dim, int8):
    """Projections seen as [batch, heads, tokens, head_dim]; caches that are halves of a buffer."""
    inputs = attention_inputs(
        dtype=dtype,
        head_dim=head_dim,
        rotary_dim=head_dim // 2 * 2,
        past=[19, 6],
        new_tokens=4,
        transposed=True,
        int8=int8,
    )
    check_attention(device, attention_op, inputs)


def test_views_of_one_projection(device, attention_op, dtype):
    """Query, key and value cut out of one fused projection, at odd offsets."""
    heads, kv_heads, head_dim = 6, 2, 24
    inputs = attention_inputs(
        dtype=dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, new_tokens=3
    )
    fused = randn(5, 2, 3, 1 + (heads + 2 * kv_heads) * head_dim, dtype=dtype)[..., 1:]
    parts = fused.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=2)
    inputs |= dict(zip(("query", "key", "value"), parts))
    check_attention(device, attention_op, inputs)


def test_caches_with_head_dim_side_by_side(device, attention_op, dtype):
    """k_cache and v_cache as the halves of rows twice as long, with a slot to spare each way."""
    inputs = attention_inputs(dtype=dtype, head_dim=20)
    both = randn(5, 3, 2, 26, 41, dtype=dtype)[1:, :, 1:25]
    k_cache, v_cache = both[..., :20], both[..., 21:]
    check_attention(device, attention_op, inputs | {"k_cache": k_cache, "v_cache": v_cache})


def test_caches_of_different_strides(device, attention_op, dtype):
    """k_cache by head, v_cache by slot."""
    inputs = attention_inputs(dtype=dtype, new_tokens=2, past=[9, 4], rotary_dim=64)
    inputs["v_cache"] = inputs["v_cache"].transpose(1, 2).contiguous().transpose(1, 2)
    check_attention(device, attention_op, inputs)


def test_head_of_one_element_at_any_stride(device, attention_op, dtype):
    inputs = attention_inputs(dtype=dtype, head_dim=1, new_tokens=2, past=[9, 4])
    for name in ("query", "key", "value", "k_cache", "v_cache"):
        inputs[name] = inputs[name].repeat_interleave(3, -1)[..., ::3]
        assert inputs[name].stride(-1) == 3
    check_attention(device, attention_op, inputs)


def test_cos_and_sin_of_the_query_dtype_and_one_for_all(device, attention_op, dtype):
    inputs = attention_inputs(dtype=dtype, past=12, new_tokens=2, rotary_dim=64)
    assert inputs["cos"].size(0) == 1
    inputs |= {"cos": inputs["cos"].to(dtype), "sin": inputs["sin"].to(dtype)}
    check_attention(device, attention_op, inputs)


def test_cos_and_sin_expanded_over_the_batch(device, attention_op):
    inputs = attention_inputs(past=12, new_tokens=2, rotary_dim=64)
    inputs |= {name: inputs[name].expand(2, 2, 64) for name in ("cos", "sin")}
    check_attention(device, attention_op, inputs)


@pytest.mark.parametrize(
    "names",
    [("seq_lens",), ("kv_start",), ("query_start",), ("sinks",), ("cos", "sin"), ("k_scale",)],
    ids=lambda names: names[0],
)
def test_small_arguments_with_gaps(device, attention_op, names):
    """Every other element of a tensor twice as long, along each dimension."""
    inputs = attention_inputs(
        past=[12, 5],
        new_tokens=2,
        rotary_dim=32,
        int8=True,
        kv_start=torch.tensor([3, 1]),
        query_start=torch.tensor([11, 6]),
        sinks=torch.tensor([0.0, 2.0, -3.0, 0.5]),
    )
    for name in names:
        tensor = inputs[name]
        for dim in range(tensor.dim()):
            tensor = tensor.repeat_interleave(2, dim)
        inputs[name] = tensor[tuple(slice(None, None, 2) for _ in range(tensor.dim()))]
    check_attention(device, attention_op, inputs)


@pytest.mark.parametrize("sinks_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_sinks(device, attention_op, sinks_dtype):
    sinks = torch.tensor([0.0, 2.0, -3.0, 0.5], dtype=sinks_dtype)
    check_attention(device, attention_op, attention_inputs(dtype=torch.bfloat16, sinks=sinks))


@pytest.mark.parametrize("kv_len", [256, 257])
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_ragged_tails_of_23_query_rows(device, attention_op, dtype, int8, kv_len):
    """8-bit caches gave gibberish on AVX2, and 23 query rows overran a row normalisation."""
    inputs = attention_inputs(
        dtype=dtype,
        batch=1,
        new_tokens=23,
        head_dim=128,
        rotary_dim=128,
        past=kv_len - 23,
        max_seq_len=kv_len,
        int8=int8,
    )
    check_attention(device, attention_op, inputs)
