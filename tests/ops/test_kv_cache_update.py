"""kv_cache_update_: a copy to the right slots, and nothing else."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support import errors
from tests.support.attention import attention_inputs, randn
from tests.support.attention_checks import assert_caches
from tests.support.errors import assert_refused, bits, every_other, written

OP = "kv_cache_update_"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def update_inputs(**options):
    """Keyword arguments of the op, on the CPU; see attention_inputs."""
    inputs = attention_inputs(**({"new_tokens": 3, "past": [5, 9]} | options))
    inputs.pop("query")
    inputs.pop("window", None)
    return inputs


def update(device, inputs):
    """The caches and scales after the call, on the CPU."""
    arguments = device.arguments(inputs)
    assert device.call(OP, **arguments) is None
    assert torch.equal(arguments["seq_lens"].cpu(), inputs["seq_lens"]), "seq_lens changed"
    for name in ("key", "value"):
        assert torch.equal(bits(arguments[name]), bits(inputs[name])), name
    names = ("k_cache", "v_cache", "k_scale", "v_scale")
    return {name: arguments[name].cpu() for name in names if name in arguments}


def check_update(device, inputs):
    assert_caches(inputs | {"query": inputs["key"]}, update(device, inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("head_dim", [1, 8, 20, 64, 80, 96, 128, 256])
def test_writes_exactly_the_new_slots(device, dtype, int8, transposed, head_dim):
    check_update(
        device, update_inputs(dtype=dtype, int8=int8, transposed=transposed, head_dim=head_dim)
    )


@pytest.mark.parametrize("new_tokens", [*range(1, 24), 100])
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_any_number_of_tokens(device, new_tokens, int8):
    check_update(
        device, update_inputs(new_tokens=new_tokens, past=[0, 7], max_seq_len=108, int8=int8)
    )


@pytest.mark.parametrize("past", [0, 21, [0, 21], [20, 3]], ids=str)
def test_lengths(device, past):
    """One length for all sequences, or one each; up to the last slot."""
    check_update(device, update_inputs(past=past))


@pytest.mark.parametrize("past", [0, 21, [22, 23], [24, 49], [(1 << 60) - 25, 3]], ids=str)
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_ring_wraps(device, past, int8):
    check_update(device, update_inputs(past=past, ring=True, int8=int8))


def test_ring_filled_at_once(device):
    check_update(device, update_inputs(past=[30, 7], new_tokens=24, ring=True))


def test_equals_concatenation(device):
    """What the op replaces: the old rows, then the new ones."""
    inputs = update_inputs(past=7)
    caches = update(device, inputs)
    for name, new in (("k_cache", inputs["key"]), ("v_cache", inputs["value"])):
        expected = torch.cat((inputs[name][:, :, :7], new.transpose(1, 2)), dim=2)
        assert torch.equal(caches[name][:, :, :10], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_bits(device, dtype):
    """NaN, infinities, signed zeros and denormals arrive as they are."""
    tiny = torch.finfo(dtype).smallest_normal
    special = [float("nan"), float("inf"), -float("inf"), -0.0, tiny / 4, -tiny / 4, 1.0, -2.0]
    inputs = update_inputs(dtype=dtype, head_dim=8)
    for name in ("key", "value"):
        inputs[name] = torch.tensor(special, dtype=dtype).expand(2, 3, 2, 8).clone()
    caches = update(device, inputs)
    for name in ("k_cache", "v_cache"):
        stored = caches[name][0, :, 5:8]
        expected = inputs["key"][0].transpose(0, 1)
        assert torch.equal(bits(stored), bits(expected)), name


QUANTIZED = {
    "zeros": ([0.0] * 8, 0.0, [0] * 8),
    "largest_becomes_127": (
        [127.0, -127.0, 1.0, -1.0, 0, 0, 0, 0],
        1.0,
        [127, -127, 1, -1] + [0] * 4,
    ),
    "ties_to_even": (
        [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5],
        1.0,
        [127, 0, 2, 2, 0, -2, -2, 4],
    ),
    "one_negative": ([0, 0, -4.0, 0, 0, 0, 0, 0], 4.0 / 127, [0, 0, -127, 0, 0, 0, 0, 0]),
    "denormal": ([1e-44] + [0.0] * 7, 0.0, None),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_int8_rows_of_worked_examples(device, name):
    """scale = max|row| / 127, q = round-half-even(x / scale); zeros have scale 0."""
    row, scale, quantized = QUANTIZED[name]
    inputs = update_inputs(head_dim=8, int8=True)
    inputs["key"] = torch.tensor(row).expand(2, 3, 2, 8).clone()
    caches = update(device, inputs)
    stored, stored_scale = caches["k_cache"][0, 1, 5], caches["k_scale"][0, 1, 5]
    assert stored_scale.item() == pytest.approx(scale, rel=1e-7, abs=0)
    if quantized is not None:
        assert stored.tolist() == quantized


def test_int8_error_is_half_a_step(device):
    inputs = update_inputs(head_dim=96, int8=True)
    caches = update(device, inputs)
    rows = caches["v_cache"][1, :, 9:12].float() * caches["v_scale"][1, :, 9:12, None]
    error = (rows - inputs["value"][1].transpose(0, 1)).abs()
    assert (error <= 0.5001 * caches["v_scale"][1, :, 9:12, None]).all()


@pytest.mark.parametrize("shape", [{"batch": 0, "past": 0}, {"new_tokens": 0}], ids=str)
def test_empty_batch_and_no_new_tokens(device, shape):
    inputs = update_inputs(**({"past": 5} | shape), unused=0.0)
    caches = update(device, inputs)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(caches[name], inputs[name])


def base(**options):
    return update_inputs(**({"head_dim": 8, "max_seq_len": 12} | options))


changed = partial(errors.changed, base)
each = partial(errors.each, base)

WRONG = {
    **{
        f"no_{name}": (TypeError, f"{name} must be a tensor, got None", changed(**{name: None}))
        for name in ("k_cache", "v_cache", "key", "value", "seq_lens")
    },
    "rank_of_k_cache": (ValueError, "k_cache", each(lambda t: t[0], "k_cache")),
    "rank_of_key": (ValueError, "key", each(lambda t: t[0], "key")),
    "rank_of_value": (ValueError, "value", each(lambda t: t[0], "value")),
    "shorter_v_cache": (ValueError, "v_cache", each(lambda t: t[:, :, :11], "v_cache")),
    "another_batch": (ValueError, "key", each(lambda t: t[:1], "key", "value")),
    "one_kv_head_for_two": (ValueError, "key", each(lambda t: t[:, :, :1], "key", "value")),
    "shorter_head": (ValueError, "key", each(lambda t: t[..., :7], "key", "value")),
    "fewer_new_values": (ValueError, "value", each(lambda t: t[:, :2], "value")),
    "bfloat16_rows": (TypeError, "key", each(torch.Tensor.bfloat16, "key", "value")),
    "bfloat16_value": (TypeError, "value", each(torch.Tensor.bfloat16, "value")),
    "integer_rows_for_int8_caches": (
        TypeError,
        "key",
        each(torch.Tensor.char, "key", "value", int8=True),
    ),
    "float64_caches": (TypeError, "k_cache", each(torch.Tensor.double, "k_cache", "v_cache")),
    "caches_of_two_dtypes": (TypeError, "v_cache", each(torch.Tensor.half, "v_cache")),
    "stride_of_k_cache": (ValueError, "k_cache", each(every_other, "k_cache")),
    "stride_of_v_cache": (ValueError, "v_cache", each(every_other, "v_cache")),
    "stride_of_key": (ValueError, "key", each(every_other, "key")),
    "stride_of_value": (ValueError, "value", each(every_other, "value")),
    "expanded_k_cache": (ValueError, "k_cache", each(lambda t: t[:1].expand_as(t), "k_cache")),
    "expanded_v_cache": (
        ValueError,
        "v_cache",
        each(lambda t: t[:, :, :1].expand_as(t), "v_cache"),
    ),
    "int32_seq_lens": (TypeError, "seq_lens", each(torch.Tensor.int, "seq_lens")),
    "seq_lens_of_three": (ValueError, "seq_lens", changed(seq_lens=torch.tensor([1, 2, 3]))),
    "at_the_capacity": (ValueError, "seq_lens", changed(seq_lens=torch.tensor(12))),
    "three_tokens_into_two_slots": (
        ValueError,
        "seq_lens",
        changed(seq_lens=torch.tensor([5, 10])),
    ),
    "at_minus_one": (ValueError, "seq_lens", changed(seq_lens=torch.tensor([-1, 5]))),
    "near_2_to_63_in_a_ring": (
        ValueError,
        "seq_lens",
        changed(seq_lens=torch.tensor((1 << 63) - 2), ring=True),
    ),
    "past_an_integer": (ValueError, "seq_lens", changed(seq_lens=torch.tensor((1 << 63) - 1))),
    "minus_one_in_a_ring": (
        ValueError,
        "seq_lens",
        changed(seq_lens=torch.tensor([5, -1]), ring=True),
    ),
    "more_tokens_than_a_ring_has": (
        ValueError,
        "key",
        lambda: update_inputs(new_tokens=13, max_seq_len=12, ring=True),
    ),
    "int8_without_scales": (
        ValueError,
        "k_scale",
        lambda: update_inputs(int8=True) | {"k_scale": None, "v_scale": None},
    ),
    "v_scale_for_11_slots": (
        ValueError,
        "v_scale",
        each(lambda t: t[..., :11], "v_scale", int8=True),
    ),
    "float16_v_scale": (TypeError, "v_scale", each(torch.Tensor.half, "v_scale", int8=True)),
    "expanded_v_scale": (
        ValueError,
        "v_scale",
        each(lambda t: t[:, :1].expand_as(t), "v_scale", int8=True),
    ),
    "scales_beside_float_caches": (
        TypeError,
        "k_scale",
        changed(k_scale=torch.ones(2, 2, 12), v_scale=torch.ones(2, 2, 12)),
    ),
    **{
        f"meta_{name}": (TypeError, f"{name}|k_cache", each(lambda t: t.to("meta"), name))
        for name in ("k_cache", "v_cache", "key", "value", "seq_lens")
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(device_family, name):
    exception, argument, make = WRONG[name]
    arguments = device_family.arguments(make())
    assert_refused(
        lambda: device_family.call(OP, **arguments),
        exception,
        OP,
        argument,
        watched=written(arguments),
    )


def test_refuses_overlapping_caches(device_family):
    buffer = device_family.tensor(randn(0, 2, 2, 13, 8))
    for v_cache in (buffer[:, :, :12], buffer[:, :, 1:]):
        arguments = device_family.arguments(base())
        arguments |= {"k_cache": buffer[:, :, :12], "v_cache": v_cache}
        assert_refused(
            lambda arguments=arguments: device_family.call(OP, **arguments),
            ValueError,
            OP,
            "v_cache",
            watched=written(arguments),
        )


@pytest.mark.parametrize("name", ["key", "value"])
def test_refuses_new_rows_that_lie_in_the_cache(device_family, name):
    arguments = device_family.arguments(base())
    arguments[name] = arguments["v_cache"][:, :, 4:7].transpose(1, 2)
    assert_refused(
        lambda: device_family.call(OP, **arguments),
        ValueError,
        OP,
        name,
        watched=written(arguments),
    )


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "key", "value"])
def test_refuses_gradients(device_family, name):
    arguments = device_family.arguments(update_inputs())
    arguments[name].requires_grad_()
    message = assert_refused(
        lambda: device_family.call(OP, **arguments),
        RuntimeError,
        OP,
        name,
        watched=written(arguments),
    )
    assert "inference only" in message
