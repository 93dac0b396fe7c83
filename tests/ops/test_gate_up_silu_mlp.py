"""gate_up_silu_mlp against float64, worked numbers and wrong calls."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from fasttps import isa, ops, reference
from fasttps.reference import quantized
from fasttps.reference.gate_up_silu_mlp import ACTIVATIONS
from tests.support import errors
from tests.support.accuracy import FLOOR, assert_accurate
from tests.support.attention import randn
from tests.support.errors import assert_refused, every_other
from tests.support.quantized import QUANTIZED, alternated, format_id, packed_weight

OP = "gate_up_silu_mlp"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (7, 17), (16, 16), (17, 33), (33, 100), (64, 48), (100, 33), (130, 257)]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


def weights_of(hidden_size, intermediate_size, dtype, seed=0, biased=False):
    """gate, up, down and their biases (or None), scaled so that all values are about 1."""
    shapes = [(intermediate_size, hidden_size)] * 2 + [(hidden_size, intermediate_size)]
    weights = [
        randn(seed + i, *shape).div(shape[1] ** 0.5).to(dtype) for i, shape in enumerate(shapes)
    ]
    biases = [
        randn(seed + 10 + i, shape[0], dtype=dtype) if biased else None
        for i, shape in enumerate(shapes)
    ]
    return weights, biases


def mlp_arguments(x, weights, biases=(None, None, None), activation="silu"):
    """Keyword arguments of the op; the weights are packed by the twin."""
    gate, up, down = weights
    packed_format = int(ops.PackedFormat.of(gate.dtype))
    return {
        "x": x,
        "gate_up": reference.pack_gate_up(gate, up, format=packed_format),
        "down": reference.pack_weight(down, format=packed_format),
        "gate_up_format": packed_format,
        "down_format": packed_format,
        "intermediate_size": gate.size(0),
        "activation": activation,
        **dict(zip(("gate_bias", "up_bias", "down_bias"), biases)),
    }


def mlp_in_torch(x, weights, biases, activation):
    """What a PyTorch user computes in the dtype of x."""
    gate, up, down = weights
    gate_bias, up_bias, down_bias = (None if b is None else b.to(x.dtype) for b in biases)
    gated = ACTIVATIONS[activation](functional.linear(x, gate, gate_bias))
    return functional.linear(gated * functional.linear(x, up, up_bias), down, down_bias)


def doubles(tensors):
    return [None if tensor is None else tensor.double() for tensor in tensors]


def check_mlp(device, x, weights, biases=(None, None, None), activation="silu"):
    arguments = device.arguments(mlp_arguments(x, weights, biases, activation))
    out = device.call(OP, **arguments)
    assert out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous()
    exact = mlp_in_torch(x.double(), doubles(weights), doubles(biases), activation)
    assert_accurate(out, exact, mlp_in_torch(x, weights, biases, activation))


@pytest.mark.parametrize("hidden_size, intermediate_size", SIZES)
def test_sizes(device, dtype, hidden_size, intermediate_size):
    weights, _ = weights_of(hidden_size, intermediate_size, dtype)
    for tokens in (1, 3):
        check_mlp(device, randn(5, tokens, hidden_size, dtype=dtype), weights)


@pytest.mark.parametrize("tokens", range(1, 24))
def test_tokens(device, dtype, tokens):
    weights, _ = weights_of(33, 50, dtype)
    check_mlp(device, randn(5, tokens, 33, dtype=dtype), weights)


@pytest.mark.parametrize("tokens", [255, 256, 257, 600])
def test_many_tokens(device, tokens):
    weights, _ = weights_of(17, 40, torch.bfloat16)
    check_mlp(device, randn(5, tokens, 17, dtype=torch.bfloat16), weights)


@pytest.mark.parametrize("product", isa.bf16_products())
def test_both_products_of_bf16(device_family, product):
    weights, _ = weights_of(100, 70, torch.bfloat16)
    for tokens in (8, 9, 250):
        with isa.bf16_product_forced(product):
            check_mlp(device_family, randn(5, tokens, 100, dtype=torch.bfloat16), weights)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_activations_and_biases(device, dtype, activation, biased):
    weights, biases = weights_of(48, 70, dtype, biased=biased)
    check_mlp(device, 2 * randn(5, 4, 48, dtype=dtype), weights, biases, activation)


@pytest.mark.parametrize("position", range(3))
def test_one_bias_alone(device, dtype, position):
    weights, biases = weights_of(20, 19, dtype, biased=True)
    biases = [bias if i == position else None for i, bias in enumerate(biases)]
    check_mlp(device, randn(5, 2, 20, dtype=dtype), weights, biases)


def test_float32_biases(device, dtype):
    weights, biases = weights_of(20, 19, dtype, biased=True)
    check_mlp(device, randn(5, 2, 20, dtype=dtype), weights, [bias.float() for bias in biases])


def test_strided_biases(device):
    weights, _ = weights_of(20, 19, torch.float32)
    biases = [randn(7, 2 * size)[::2] for size in (19, 19, 20)]
    check_mlp(device, randn(5, 2, 20), weights, biases)


@pytest.mark.parametrize(
    "activation, expected", [("silu", 0.731059), ("gelu", 0.841345), ("gelu_tanh", 0.841192)]
)
def test_activation_of_one(device, activation, expected):
    """All weights 1: a GELU taken for a SiLU shows in the first digit."""
    one = torch.ones(1, 1)
    arguments = device.arguments(mlp_arguments(one, [one] * 3, activation=activation))
    assert device.call(OP, **arguments).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_over_their_range(device, activation):
    """From where they vanish to where they are the identity, element by element."""
    gate = torch.cat((torch.linspace(-100, 100, 401), torch.tensor([-1e30, 1e30, -0.0, 1e-30])))
    size = gate.numel()
    weights = [torch.diag(gate), torch.zeros(size, size), torch.eye(size)]
    biases = [None, torch.ones(size), None]
    x = torch.ones(1, size)
    out = device.call(OP, **device.arguments(mlp_arguments(x, weights, biases, activation)))
    exact = ACTIVATIONS[activation](gate.double())
    torch.testing.assert_close(out[0].double().cpu(), exact, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(20,), (1, 20), (2, 3, 20), (2, 1, 3, 20)], ids=str)
def test_ranks_of_x(device, dtype, shape):
    weights, _ = weights_of(20, 19, dtype)
    check_mlp(device, randn(5, *shape, dtype=dtype), weights)


@pytest.mark.parametrize("shape", [(0, 20), (2, 0, 20)], ids=str)
def test_no_tokens(device, dtype, shape):
    weights, _ = weights_of(20, 19, dtype)
    x = torch.zeros(shape, dtype=dtype)
    out = device.call(OP, **device.arguments(mlp_arguments(x, weights)))
    assert out.shape == shape and out.dtype == dtype


def test_strides_of_x(device, dtype):
    """A transposed batch, rows cut out of wider ones, a row repeated by stride 0."""
    weights, _ = weights_of(20, 19, dtype)
    wide = randn(5, 4, 3, 31, dtype=dtype)
    check_mlp(device, wide[..., 5:25].transpose(0, 1), weights)
    check_mlp(device, wide[:1, :, :20].expand(4, 3, 20), weights)


def test_tokens_do_not_meet(device, dtype):
    """NaN and inf in one token leave the others as they are."""
    weights, _ = weights_of(33, 50, dtype)
    x = randn(5, 9, 33, dtype=dtype)
    clean = device.call(OP, **device.arguments(mlp_arguments(x, weights))).cpu()
    for token, poison in ((0, float("nan")), (4, float("inf")), (8, float("nan"))):
        x[token, 7] = poison
    out = device.call(OP, **device.arguments(mlp_arguments(x, weights))).cpu()
    assert out[[0, 8]].isnan().all() and not out[4].isfinite().any()
    others = [1, 2, 3, 5, 6, 7]
    assert torch.equal(out[others], clean[others])


def test_nan_in_a_weight_propagates(device, dtype):
    weights, _ = weights_of(33, 50, dtype)
    weights[2][6, 49] = float("nan")
    x = randn(5, 2, 33, dtype=dtype)
    out = device.call(OP, **device.arguments(mlp_arguments(x, weights)))
    assert out[:, 6].isnan().all()
    assert out[:, [*range(6), *range(7, 33)]].isfinite().all()
    weights[1][20, 0] = float("nan")
    out = device.call(OP, **device.arguments(mlp_arguments(x, weights)))
    assert out.isnan().all()


def test_packed_by_the_op(device, dtype):
    """What the device's own pack ops make, its MLP reads."""
    weights, _ = weights_of(33, 50, dtype)
    arguments = device.arguments(mlp_arguments(randn(5, 3, 33, dtype=dtype), weights))
    expected = device.call(OP, **arguments)
    packed_format = arguments["down_format"]
    gate, up, down = (device.tensor(weight) for weight in weights)
    arguments |= {
        "gate_up": device.call("pack_gate_up", gate=gate, up=up, format=packed_format),
        "down": device.call("pack_weight", weight=down, format=packed_format),
    }
    assert torch.equal(device.call(OP, **arguments), expected)


def test_autocast_changes_nothing(device):
    weights, biases = weights_of(33, 50, torch.float32, biased=True)
    arguments = device.arguments(mlp_arguments(randn(5, 3, 33), weights, biases))
    expected = device.call(OP, **arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(device.call(OP, **arguments), expected)


def packed_half(case, op, rows, cols, seed, dtype):
    """(packed, its format and group size, the float weights that it holds), cols rounded up."""
    if case is None:
        count = 2 if op == "gate_up" else 1
        weights = [randn(seed + i, rows, cols).div(cols**0.5).to(dtype) for i in range(count)]
        packed_format = int(ops.PackedFormat.of(dtype))
        pack = reference.pack_gate_up if count == 2 else reference.pack_weight
        return pack(*weights, format=packed_format), packed_format, 0, weights
    named, weight = packed_weight(case, rows, cols, seed)
    if op == "down":
        return named["packed"], named["format"], named["group_size"], [weight]
    other, up = packed_weight(case, rows, cols, seed + 1)
    both = alternated(named["packed"], other["packed"], rows)
    return both, named["format"], named["group_size"], [weight, up]


def check_quantized(
    device, dtype, gate_up_case, down_case, int8_activation, tokens, hidden_size, intermediate_size
):
    """Against float64 on the rounded weights, and on x where that is rounded.

    The intermediate is rounded to int8 too, by 32 columns; what the float64 and our intermediate
    differ in may move a quant by a step, 1/127 of its group's largest element, at most.
    """
    gate_up, gate_up_format, gate_up_group, (gate, up) = packed_half(
        gate_up_case, "gate_up", intermediate_size, hidden_size, 0, dtype
    )
    packed_down, down_format, down_group, (down,) = packed_half(
        down_case, "down", hidden_size, intermediate_size, 7, dtype
    )
    x = randn(5, tokens, hidden_size, dtype=dtype)
    arguments = {
        "x": x,
        "gate_up": gate_up,
        "down": packed_down,
        "gate_up_format": gate_up_format,
        "down_format": down_format,
        "gate_up_group_size": gate_up_group,
        "down_group_size": down_group,
        "intermediate_size": intermediate_size,
        "int8_activation": int8_activation,
    }
    out = device.call(OP, **device.arguments(arguments))
    assert out.shape == x.shape and out.dtype == dtype and out.is_contiguous()
    exact = reference.gate_up_silu_mlp(**(arguments | {"x": x.double()}))
    met = quantized.int8_activation(x) if int8_activation and gate_up_case else x
    in_torch = mlp_in_torch(met.float(), [t.float() for t in (gate, up, down)], (None,) * 3, "silu")
    if not (int8_activation and down_case):
        assert_accurate(out, exact, in_torch.to(dtype))
        return
    inner = functional.silu(met.double() @ gate.double().t()) * (met.double() @ up.double().t())
    steps = inner.abs().amax() / 127 * down.double().abs().sum(-1)
    floor = FLOOR[dtype] * exact.abs().max() + 1e-3 * steps
    moved = (out.double().cpu() - exact).abs()
    assert (moved <= floor + steps / down.size(1) * 2).all()


@pytest.mark.parametrize("int8_activation", [False, True], ids=["", "int8"])
@pytest.mark.parametrize(
    "gate_up_case, down_case",
    [
        *((case, case) for case in QUANTIZED),
        (None, (ops.PackedFormat.INT4, 128)),
        ((ops.PackedFormat.INT8, 0), None),
        ((ops.PackedFormat.INT4, 32), (ops.PackedFormat.Q6_K, 0)),
    ],
    ids=lambda case: "float" if case is None else format_id(case),
)
def test_quantized(device, dtype, gate_up_case, down_case, int8_activation):
    k_quants = (ops.PackedFormat.Q4_K, ops.PackedFormat.Q6_K)
    wide = any(case is not None and case[0] in k_quants for case in (gate_up_case, down_case))
    sizes = (256, 256) if wide else (48, 70)
    for tokens in (1, 5, 9):
        check_quantized(device, dtype, gate_up_case, down_case, int8_activation, tokens, *sizes)


def test_refuses_int8_activation_without_quantized_weights(device_family):
    arguments = device_family.arguments(base() | {"int8_activation": True})
    assert_refused(lambda: device_family.call(OP, **arguments), ValueError, OP, "int8_activation")


def base():
    weights, biases = weights_of(20, 18, torch.bfloat16, biased=True)
    return mlp_arguments(randn(5, 3, 20, dtype=torch.bfloat16), weights, biases)


changed, each = partial(errors.changed, base), partial(errors.each, base)
LINEAR = torch.zeros(18, 20, dtype=torch.bfloat16)

WRONG = {
    **{
        f"no_{name}": (TypeError, f"{name} must be a tensor, got None", changed(**{name: None}))
        for name in ("x", "gate_up", "down")
    },
    "no_hidden_size": (ValueError, "x", changed(x=torch.tensor(1.0, dtype=torch.bfloat16))),
    "float64_x": (TypeError, "x", each(torch.Tensor.double, "x")),
    "integer_x": (TypeError, "x", each(torch.Tensor.int, "x")),
    "float32_x_for_bfloat16_weights": (TypeError, "x", each(torch.Tensor.float, "x")),
    "wider_x": (ValueError, "x|gate_up", each(lambda t: torch.cat((t, t), -1), "x")),
    "stride_of_x": (ValueError, "x", each(every_other, "x")),
    "unpacked_gate": (TypeError, "gate_up", changed(gate_up=LINEAR)),
    "unpacked_down": (TypeError, "down", changed(down=LINEAR.t())),
    "unpacked_bytes": (ValueError, "gate_up", changed(gate_up=LINEAR.view(torch.uint8))),
    "rank_4_gate_up": (ValueError, "gate_up", each(lambda t: t.view(1, 1, 2, -1), "gate_up")),
    "gate_up_one_byte_short": (ValueError, "gate_up", each(lambda t: t[:-1], "gate_up")),
    "down_one_panel_short": (ValueError, "down", each(lambda t: t[: t.numel() // 2], "down")),
    "down_in_place_of_gate_up": (
        ValueError,
        "gate_up",
        lambda: base() | {"gate_up": base()["down"]},
    ),
    "every_other_byte": (
        ValueError,
        "down",
        each(lambda t: t.repeat_interleave(2)[::2], "down"),
    ),
    "unknown_gate_up_format": (ValueError, "gate_up_format", changed(gate_up_format=10)),
    "unknown_down_format": (ValueError, "down_format", changed(down_format=-1)),
    "formats_that_differ": (TypeError, "down", changed(down_format=2)),
    "formats_of_another_dtype": (TypeError, "x", changed(gate_up_format=2, down_format=2)),
    "intermediate_size_of_0": (ValueError, "intermediate_size", changed(intermediate_size=0)),
    "negative_intermediate_size": (ValueError, "intermediate_size", changed(intermediate_size=-18)),
    "intermediate_size_that_wraps": (
        ValueError,
        "intermediate_size",
        changed(intermediate_size=(1 << 63) - 1),
    ),
    "larger_intermediate_size": (ValueError, "gate_up", changed(intermediate_size=40)),
    "group_of_48": (ValueError, "gate_up", changed(gate_up_group_size=48)),
    "group_of_-1": (ValueError, "down", changed(down_group_size=-1)),
    "unknown_activation": (ValueError, "activation", changed(activation="relu")),
    "empty_activation": (ValueError, "activation", changed(activation="")),
    "gate_bias_for_17_of_18_rows": (ValueError, "gate_bias", each(lambda t: t[1:], "gate_bias")),
    "rank_of_up_bias": (ValueError, "up_bias", each(lambda t: t.view(1, -1), "up_bias")),
    "empty_down_bias": (ValueError, "down_bias", each(lambda t: t[:0], "down_bias")),
    "float16_down_bias": (TypeError, "down_bias", each(torch.Tensor.half, "down_bias")),
    **{
        f"meta_{name}": (TypeError, f"{name}|x|gate_up", each(lambda t: t.to("meta"), name))
        for name in ("x", "gate_up", "down", "gate_bias", "up_bias", "down_bias")
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(device_family, name):
    exception, argument, make = WRONG[name]
    arguments = device_family.arguments(make())
    assert_refused(lambda: device_family.call(OP, **arguments), exception, OP, argument)


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_refuses_unaligned_weights(device_family, name):
    arguments = device_family.arguments(base())
    size = arguments[name].numel()
    moved = device_family.tensor(torch.zeros(size + 64, dtype=torch.uint8))[2:][:size]
    message = assert_refused(
        lambda: device_family.call(OP, **(arguments | {name: moved})), ValueError, OP, name
    )
    assert "64-byte" in message


@pytest.mark.parametrize("name", ["x", "gate_bias", "up_bias", "down_bias"])
def test_refuses_gradients(device_family, name):
    arguments = device_family.arguments(base())
    arguments[name].requires_grad_()
    message = assert_refused(lambda: device_family.call(OP, **arguments), RuntimeError, OP, name)
    assert "inference only" in message
