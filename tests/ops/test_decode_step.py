"""decode_step against float64, against the ops that it fuses, and wrong calls."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch

from fasttps import ops, reference
from tests.support import errors
from tests.support.accuracy import assert_accurate
from tests.support.attention import randn
from tests.support.decoder import Decoder
from tests.support.errors import assert_refused

OP = "decode_step"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


def hidden(batch, new_tokens, decoder):
    return randn(1, batch, new_tokens, decoder.hidden_size, dtype=decoder.dtype)


def token_ids(batch, new_tokens, decoder):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(decoder.vocab_size, (batch, new_tokens), generator=generator)


def check(device, decoder, arguments, same_dtype=None):
    exact = decoder.in_torch(arguments, torch.float64)
    in_torch = decoder.in_torch(arguments, same_dtype or decoder.dtype)
    out = device.call(OP, **device.arguments(arguments))
    assert out.dtype == torch.float32 and out.is_contiguous()
    assert_accurate(out, exact, in_torch)
    return out


@pytest.mark.parametrize(
    "batch, new_tokens, past", [(1, 1, 0), (1, 1, 9), (2, 3, [4, 0]), (3, 1, [5, 20, 0])]
)
def test_hidden_states(device, dtype, batch, new_tokens, past):
    decoder = Decoder(dtype=dtype)
    check(device, decoder, decoder.arguments(hidden(batch, new_tokens, decoder), past))


@pytest.mark.parametrize("new_tokens", [1, 2])
def test_token_ids_to_logits(device, dtype, new_tokens):
    decoder = Decoder(dtype=dtype)
    arguments = decoder.arguments(token_ids(2, new_tokens, decoder), [3, 6], ends=True)
    logits = check(device, decoder, arguments)
    first = device.call(OP, **device.arguments(arguments), argmax=True)
    assert first.dtype == torch.int64
    assert torch.equal(first.cpu(), logits.cpu().argmax(-1))


@pytest.mark.parametrize(
    "options", [{"windows": [3]}, {"windows": [100, 100]}, {"kv_start": torch.tensor([2, 0])}]
)
def test_what_a_token_may_see(device, dtype, options):
    decoder = Decoder(dtype=dtype, options=options)
    check(device, decoder, decoder.arguments(hidden(2, 2, decoder), [9, 5]))


@pytest.mark.parametrize(
    "shape",
    [
        {"biased": True},
        {"interleaved": True, "rotary_dim": 8},
        {"activation": "gelu"},
        {"activation": "gelu_tanh", "biased": True},
        {"num_heads": 6, "num_kv_heads": 1, "head_dim": 10},
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 96, "hidden_size": 33},
        {"hidden_size": 7, "intermediate_size": 5, "vocab_size": 3},
    ],
    ids=str,
)
def test_shapes_and_options(device, dtype, shape):
    decoder = Decoder(dtype=dtype, **shape)
    check(device, decoder, decoder.arguments(token_ids(2, 1, decoder), 6, ends=True))


def test_float32_norms_and_tables_beside_16_bit_weights(device):
    decoder = Decoder(dtype=torch.bfloat16)
    arguments = decoder.arguments(hidden(1, 1, decoder), 6)
    arguments["norms"] = [norm.float() for norm in arguments["norms"]]
    check(device, decoder, arguments)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("past", [700, [650, 3], [0, 90]])
def test_long_caches_split_over_threads(device, threads, past):
    """The split moves roundings of float32 and nothing else; each new row is written once."""
    decoder = Decoder(
        hidden_size=512, intermediate_size=256, num_kv_heads=1, max_seq_len=720, layers=1
    )
    batch = 1 if isinstance(past, int) else len(past)
    arguments = decoder.arguments(hidden(batch, 2, decoder), past)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(device, decoder, arguments)
    finally:
        torch.set_num_threads(before)


def test_int8_caches(device):
    """A key or value moves by at most half a step of its row's scale, 1/254 of its largest."""
    decoder = Decoder(int8_cache=True)
    arguments = device.arguments(decoder.arguments(hidden(2, 2, decoder), [5, 9]))
    exact = decoder.in_torch(arguments, torch.float64)
    out = device.call(OP, **arguments)
    assert (out.cpu() - exact).abs().max() < 0.02 * exact.abs().max()
    for name in ("k_scales", "v_scales"):
        assert all(bool((scale > 0).all()) for scale in arguments[name])


INT8, INT4, INT4_MIN, INT4_ZERO = 3, 4, 5, 9
QUANTIZED = {
    "int8": ([INT8] * 7, 0),
    "int4": ([INT4] * 7, 32),
    "int4_128": ([INT4] * 7, 128),
    "int4_min": ([INT4_MIN] * 7, 64),
    "int4_zero": ([INT4_ZERO] * 7, 64),
    # As in GGUF files, whose matrices differ in type; f32 beside them takes no int8 activations.
    "mixed": ([INT4, 0, INT8, INT4_MIN, INT4, INT8, INT4], 32),
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("batch", [1, 3])
def test_quantized_weights(device, name, batch):
    """Against float64 on the weights that the packed ones stand for."""
    formats, group_size = QUANTIZED[name]
    decoder = Decoder(formats=formats, group_size=group_size, hidden_size=64)
    check(device, decoder, decoder.arguments(token_ids(batch, 1, decoder), 7, ends=True))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("batch", [1, 9])
def test_int8_activations(device, name, batch):
    """Against the twin, which rounds to the same steps: a tie may fall either way, by one step.

    A step is 1/254 of the largest of 32 activations, and a sum of 40 products hides it but for
    a few hundredths; rounded activations at all move the result by more than float ones do.
    """
    formats, group_size = QUANTIZED[name]
    decoder = Decoder(formats=formats, group_size=group_size, hidden_size=64)
    arguments = decoder.arguments(token_ids(batch, 1, decoder), 7, ends=True)
    arguments["int8_activation"] = True
    exact = reference.decode_step(**copy.deepcopy(arguments)).double()
    out = device.call(OP, **device.arguments(arguments)).double().cpu()
    largest = float(exact.abs().max())
    assert float((out - exact).abs().max()) < 0.02 * largest
    float_activations = decoder.in_torch(arguments, torch.float64)
    assert float((out - float_activations).abs().max()) < 0.1 * largest
    assert not torch.allclose(out, float_activations, rtol=0, atol=1e-4 * largest)


def test_writes_the_new_rows_and_nothing_else(device, dtype):
    decoder = Decoder(dtype=dtype)
    arguments = device.arguments(decoder.arguments(hidden(2, 2, decoder), [5, 9]))
    caches = arguments["k_caches"] + arguments["v_caches"]
    before = [cache.clone() for cache in caches]
    device.call(OP, **arguments)
    for cache, old in zip(caches, before):
        for at, first in enumerate((5, 9)):
            kept = torch.ones(decoder.max_seq_len, dtype=torch.bool)
            kept[first : first + 2] = False
            assert torch.equal(cache[at][:, kept], old[at][:, kept])
            assert not torch.equal(cache[at][:, ~kept], old[at][:, ~kept])


def test_slots_past_the_end_never_contribute(device, dtype):
    decoder = Decoder(dtype=dtype, options={"kv_start": torch.tensor([2, 0])})
    arguments = decoder.arguments(hidden(2, 1, decoder), [5, 9])
    for cache in arguments["k_caches"] + arguments["v_caches"]:
        cache[0, :, 6:] = cache[1, :, 10:] = float("nan")
        cache[0, :, :2] = float("inf")
    out = check(device, decoder, arguments)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_token(device, dtype, value):
    decoder = Decoder(dtype=dtype)
    arguments = decoder.arguments(hidden(2, 1, decoder), [5, 9])
    arguments["input"][0, 0, 3] = value
    out = device.call(OP, **device.arguments(arguments)).cpu()
    assert bool(out[0].isnan().all()) and bool(out[1].isfinite().all())


def test_argmax_takes_the_first_of_equals_and_nan_before_all(device):
    decoder = Decoder(vocab_size=40)
    arguments = decoder.arguments(token_ids(1, 1, decoder), 3, ends=True)
    dense = torch.zeros(40, decoder.hidden_size)
    arguments["lm_head"] = ops.pack_weight(dense, format=0)
    assert int(device.call(OP, **device.arguments(arguments), argmax=True)) == 0
    dense[33] = float("nan")
    arguments["lm_head"] = ops.pack_weight(dense, format=0)
    assert int(device.call(OP, **device.arguments(arguments), argmax=True)) == 33


def test_no_tokens(device_family):
    decoder = Decoder()
    arguments = device_family.arguments(decoder.arguments(hidden(2, 1, decoder), [5, 9]))
    arguments["input"] = arguments["input"][:, :0]
    arguments["cos"], arguments["sin"] = arguments["cos"][:, :0], arguments["sin"][:, :0]
    assert device_family.call(OP, **arguments).shape == (2, 0, decoder.hidden_size)


def base():
    decoder = Decoder()
    return decoder.arguments(token_ids(2, 1, decoder), [5, 9], ends=True)


def replaced(name, at, value):
    """The valid call with one element of a list in place of its own."""

    def arguments():
        inputs = base()
        changed = list(inputs[name])
        changed[at] = value(changed[at]) if callable(value) else value
        return inputs | {name: changed}

    return arguments


def without(name, count=1):
    return lambda: base() | {name: base()[name][:-count]}


def reorder(columns, order=None):
    return {"orders": [torch.arange(40) if order is None else order], "columns": columns}


WRONG = {
    "ids_without_embedding": (ValueError, "embedding", lambda: base() | {"embedding": None}),
    "hidden_with_embedding": (
        ValueError,
        "embedding",
        lambda: base() | {"input": torch.zeros(2, 1, 40)},
    ),
    "id_past_the_vocabulary": (
        ValueError,
        "input",
        lambda: base() | {"input": torch.tensor([[1], [75]])},
    ),
    "negative_id": (ValueError, "input", lambda: base() | {"input": torch.tensor([[1], [-1]])}),
    "input_rank": (ValueError, "input", lambda: base() | {"input": torch.tensor([1, 2])}),
    "input_dtype": (
        TypeError,
        "input",
        lambda: base() | {"input": torch.zeros(2, 1, 40).double(), "embedding": None},
    ),
    "five_weights": (ValueError, "weights", without("weights")),
    "no_weights": (ValueError, "weights", lambda: base() | {"weights": []}),
    "weight_of_another_size": (
        ValueError,
        r"weights\[7\] \(layer 1, k",
        replaced("weights", 7, lambda t: t[:-64].clone()),
    ),
    "weight_not_packed": (TypeError, r"weights\[3", replaced("weights", 3, torch.zeros(40, 64))),
    "unknown_format": (ValueError, "formats", replaced("formats", 2, 99)),
    "too_few_formats": (ValueError, "formats", without("formats")),
    "too_few_group_sizes": (ValueError, "group_sizes", without("group_sizes")),
    "a_norm_too_many": (ValueError, "norms", lambda: base() | {"norms": base()["norms"] * 2}),
    "norm_size": (ValueError, r"norms\[1", replaced("norms", 1, torch.ones(41))),
    "norm_dtype": (TypeError, r"norms\[1", replaced("norms", 1, torch.ones(40).long())),
    "a_cache_missing": (ValueError, "v_caches", without("v_caches")),
    "cache_shape": (
        ValueError,
        r"[kv]_caches\[1",
        replaced("k_caches", 1, torch.zeros(2, 2, 24, 17)),
    ),
    "int8_cache_without_scales": (
        ValueError,
        "k_scales?",
        lambda: (
            (b := base()) | {n: [t.to(torch.int8) for t in b[n]] for n in ("k_caches", "v_caches")}
        ),
    ),
    "cache_full": (ValueError, "seq_lens", lambda: base() | {"seq_lens": torch.tensor([5, 24])}),
    "negative_length": (
        ValueError,
        "seq_lens",
        lambda: base() | {"seq_lens": torch.tensor([-1, 3])},
    ),
    "lengths_of_another_batch": (
        ValueError,
        "seq_lens",
        lambda: base() | {"seq_lens": torch.tensor([1, 2, 3])},
    ),
    "lengths_in_int32": (
        TypeError,
        "seq_lens",
        lambda: base() | {"seq_lens": torch.tensor([1, 2], dtype=torch.int32)},
    ),
    "cos_shape": (ValueError, "cos", lambda: base() | {"cos": torch.zeros(2, 2, 16)}),
    "odd_rotary_dim": (ValueError, "cos", lambda: base() | {"cos": torch.zeros(2, 1, 15)}),
    "sin_shape": (ValueError, "sin", lambda: base() | {"sin": torch.zeros(2, 1, 14)}),
    "num_heads": (ValueError, "num_heads", lambda: base() | {"num_heads": 3}),
    "too_many_rows": (
        ValueError,
        "input",
        lambda: base() | {"input": torch.zeros(2, 33, dtype=torch.int64)},
    ),
    "intermediate_size": (
        ValueError,
        "intermediate_size",
        lambda: base() | {"intermediate_size": 0},
    ),
    "norm_eps": (ValueError, "norm_eps", lambda: base() | {"norm_eps": float("nan")}),
    "window": (ValueError, "windows", lambda: base() | {"windows": [-1]}),
    "windows": (ValueError, "windows", lambda: base() | {"windows": [1, 2, 3]}),
    "ring": (ValueError, "windows", lambda: base() | {"windows": [25], "ring": True}),
    "head_norms": (ValueError, "head_norms", lambda: base() | {"head_norms": [None]}),
    "head norm": (ValueError, "head_norms", lambda: base() | {"head_norms": [torch.ones(3)] * 4}),
    "out_norms": (ValueError, "out_norms", lambda: base() | {"out_norms": [None] * 3}),
    "out norm": (ValueError, "out_norms", lambda: base() | {"out_norms": [torch.ones(3)] * 4}),
    "norm_offset": (ValueError, "norm_offset", lambda: base() | {"norm_offset": math.nan}),
    "residual_scale": (ValueError, "residual_scale", lambda: base() | {"residual_scale": math.inf}),
    "logits_scale": (ValueError, "logits_scale", lambda: base() | {"logits_scale": math.inf}),
    "softcap": (ValueError, "softcap", lambda: base() | {"softcap": 0.0}),
    "logits_softcap": (ValueError, "logits_softcap", lambda: base() | {"logits_softcap": -1.0}),
    "ropes": (ValueError, "ropes", lambda: base() | {"ropes": [0, 1]}),
    "columns' count": (ValueError, "columns", lambda: base() | reorder([-1])),
    "columns past the orders": (ValueError, "columns", lambda: base() | reorder([1] + [-1] * 11)),
    "columns of down": (ValueError, "columns", lambda: base() | reorder([-1] * 5 + [0] + [-1] * 6)),
    "columns without orders": (
        ValueError,
        "columns",
        lambda: base() | {"columns": [0] + [-1] * 11},
    ),
    "a shorter order": (
        ValueError,
        "orders",
        lambda: base() | reorder([0] + [-1] * 11, torch.arange(3)),
    ),
    "an order of int32": (
        TypeError,
        "orders",
        lambda: base() | reorder([0] + [-1] * 11, torch.arange(40, dtype=torch.int32)),
    ),
    "a column past the last": (
        ValueError,
        "orders",
        lambda: base() | reorder([0] + [-1] * 11, torch.arange(1, 41)),
    ),
    "a negative column": (
        ValueError,
        "orders",
        lambda: base() | reorder([0] + [-1] * 11, torch.arange(-1, 39)),
    ),
    "ropes' count": (ValueError, "ropes", lambda: base() | {"ropes": [0]}),
    "scale": (ValueError, "scale", lambda: base() | {"scale": float("inf")}),
    "scale_past_float32": (ValueError, "scale", lambda: base() | {"scale": 1e300}),
    "softcap_below_float32": (ValueError, "softcap", lambda: base() | {"softcap": 1e-300}),
    "kv_start": (ValueError, "kv_start", lambda: base() | {"kv_start": torch.tensor([1])}),
    "activation": (ValueError, "activation", lambda: base() | {"activation": "relu"}),
    "biases": (ValueError, "biases", lambda: base() | {"biases": [None] * 6}),
    "bias_size": (
        ValueError,
        r"biases\[9\] \(layer 1, v",
        lambda: base() | {"biases": [None] * 9 + [torch.zeros(3)] + [None] * 4},
    ),
    "vocab_size": (ValueError, "vocab_size", lambda: base() | {"vocab_size": 0}),
    "vocab_size_of_another_head": (ValueError, "embedding", lambda: base() | {"vocab_size": 100}),
    "argmax_without_head": (
        ValueError,
        "lm_head",
        lambda: base() | {"lm_head": None, "argmax": True},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device_family, name):
    exception, argument, make = WRONG[name]
    arguments = device_family.arguments(make())
    watched = [t for n in ("k_caches", "v_caches") for t in arguments[n]]
    assert_refused(lambda: device_family.call(OP, **arguments), exception, OP, argument, watched)


def test_one_cache_for_two_layers_is_refused(device_family):
    arguments = device_family.arguments(base())
    keys, values = arguments["k_caches"], arguments["v_caches"]
    for k_caches, v_caches in (
        ([keys[0], keys[0][:]], values),
        (keys, [values[0][:], values[0]]),
        (keys, keys),
    ):
        call = partial(ops.decode_step, **arguments | {"k_caches": k_caches, "v_caches": v_caches})
        assert_refused(call, ValueError, OP, "k_caches|v_caches")


def test_caches_that_overlap_past_a_neighbour_are_refused(device_family):
    """The second begins between the first and the third, and meets neither."""
    arguments = device_family.arguments(base())
    heads, slots = arguments["k_caches"][0].shape[1:3]
    buffer = device_family.tensor(randn(0, 2, heads + 1, 2 * slots, arguments["cos"].size(-1)))
    arguments["k_caches"] = [buffer[:, :heads, :slots], buffer[:, 1:, :slots]]
    arguments["v_caches"][0] = buffer[:, :heads, slots:]
    watched = [buffer, *arguments["v_caches"]]
    call = partial(ops.decode_step, **arguments)
    assert_refused(call, ValueError, OP, r"k_caches\[1\] must not share memory", watched)


def test_caches_and_scales_are_named_with_their_layer(device_family):
    arguments = device_family.arguments(base())
    arguments["v_caches"][1] = arguments["v_caches"][1].double()
    assert_refused(partial(ops.decode_step, **arguments), TypeError, OP, r"v_caches\[1\] must")


@pytest.mark.parametrize("name", ["input", "seq_lens", "cos", "sin"])
def test_none_is_no_tensor(device_family, name):
    arguments = device_family.arguments(base()) | {name: None}
    call = partial(ops.decode_step, **arguments)
    assert_refused(call, TypeError, OP, f"{name} must be a tensor, got None")


def test_gradient_is_refused(device_family):
    arguments = device_family.arguments(base())
    arguments["norms"][0].requires_grad_()
    with pytest.raises(RuntimeError, match="norms"):
        device_family.call(OP, **arguments)


def test_errors_are_told_by_meta_tensors_too():
    inputs = errors.changed(base, vocab_size=100)()
    meta = {
        name: [t.to("meta") if isinstance(t, torch.Tensor) else t for t in value]
        if isinstance(value, list)
        else value.to("meta")
        if isinstance(value, torch.Tensor)
        else value
        for name, value in inputs.items()
    }
    assert_refused(lambda: ops.decode_step(**meta), ValueError, OP, "embedding")
