"""packed_linear against float64, and wrong calls."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from fasttps import isa, ops, reference
from fasttps.reference import quantized
from tests.support import errors
from tests.support.accuracy import assert_accurate
from tests.support.attention import randn
from tests.support.errors import assert_refused, every_other
from tests.support.quantized import QUANTIZED, ROUNDED, format_id, packed_weight

OP = "packed_linear"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (1, 100), (7, 33), (16, 16), (17, 100), (33, 2), (48, 257), (200, 130)]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


def linear_arguments(x, weight, bias=None):
    packed_format = int(ops.PackedFormat.of(weight.dtype))
    return {
        "x": x,
        "packed": reference.pack_weight(weight, format=packed_format),
        "format": packed_format,
        "rows": weight.size(0),
        "bias": bias,
    }


def weight_of(rows, cols, dtype):
    return randn(0, rows, cols).div(cols**0.5).to(dtype)


def check_linear(device, x, weight, bias=None):
    out = device.call(OP, **device.arguments(linear_arguments(x, weight, bias)))
    assert out.shape == (*x.shape[:-1], weight.size(0))
    assert out.dtype == x.dtype and out.is_contiguous()
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    same = functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    assert_accurate(out, exact, same)


@pytest.mark.parametrize("rows, cols", SIZES)
def test_sizes(device, dtype, rows, cols):
    weight = weight_of(rows, cols, dtype)
    for tokens in (1, 3):
        check_linear(device, randn(5, tokens, cols, dtype=dtype), weight)


@pytest.mark.parametrize("tokens", [*range(1, 28), 64, 127, 128, 129, 255, 257, 600])
def test_tokens(device, tokens):
    """One, two and three panels: a token's answer does not depend on how many come with it."""
    for dtype, rows in ((torch.bfloat16, 40), (torch.float32, 17)):
        weight = weight_of(rows, 50, dtype)
        check_linear(device, randn(5, tokens, 50, dtype=dtype), weight)


@pytest.mark.parametrize("product", isa.bf16_products())
@pytest.mark.parametrize("tokens", [8, 9, 30])
def test_both_products_of_bf16(device_family, product, tokens):
    """Many tokens are multiplied by the one chosen; both are exact, and differ in their sums."""
    weight, x = weight_of(40, 600, torch.bfloat16), randn(5, tokens, 600, dtype=torch.bfloat16)
    with isa.bf16_product_forced(product):
        check_linear(device_family, x, weight)


@pytest.mark.parametrize("cols", [127, 128, 129, 1000])
def test_blocks_of_columns(device, dtype, cols):
    weight = weight_of(20, cols, dtype)
    check_linear(device, randn(5, 9, cols, dtype=dtype), weight)


def test_biases(device, dtype):
    weight, x = weight_of(19, 20, dtype), randn(5, 3, 20, dtype=dtype)
    for bias in (randn(6, 19, dtype=dtype), randn(6, 19), randn(6, 38)[::2]):
        check_linear(device, x, weight, bias)


@pytest.mark.parametrize("shape", [(20,), (1, 20), (2, 3, 20), (2, 1, 3, 20)], ids=str)
def test_ranks_of_x(device, dtype, shape):
    check_linear(device, randn(5, *shape, dtype=dtype), weight_of(19, 20, dtype))


@pytest.mark.parametrize("shape", [(0, 20), (2, 0, 20)], ids=str)
def test_no_tokens(device, dtype, shape):
    arguments = linear_arguments(torch.zeros(shape, dtype=dtype), weight_of(19, 20, dtype))
    out = device.call(OP, **device.arguments(arguments))
    assert out.shape == (*shape[:-1], 19) and out.dtype == dtype


def test_strides_of_x(device, dtype):
    """A transposed batch, rows cut out of wider ones, a row repeated by stride 0."""
    weight = weight_of(19, 20, dtype)
    wide = randn(5, 4, 3, 31, dtype=dtype)
    check_linear(device, wide[..., 5:25].transpose(0, 1), weight)
    check_linear(device, wide[:1, :, :20].expand(4, 3, 20), weight)


def test_tokens_do_not_meet(device, dtype):
    """NaN and inf in one token leave the others as they are."""
    weight, x = weight_of(50, 33, dtype), randn(5, 9, 33, dtype=dtype)
    clean = device.call(OP, **device.arguments(linear_arguments(x, weight))).cpu()
    for token, poison in ((0, float("nan")), (4, float("inf")), (8, float("nan"))):
        x[token, 7] = poison
    out = device.call(OP, **device.arguments(linear_arguments(x, weight))).cpu()
    assert out[[0, 8]].isnan().all() and not out[4].isfinite().any()
    others = [1, 2, 3, 5, 6, 7]
    assert torch.equal(out[others], clean[others])


def test_nan_in_a_weight_propagates(device, dtype):
    weight = weight_of(50, 33, dtype)
    weight[17, 32] = float("nan")
    out = device.call(
        OP, **device.arguments(linear_arguments(randn(5, 2, 33, dtype=dtype), weight))
    )
    assert out[:, 17].isnan().all()
    assert out[:, [*range(17), *range(18, 50)]].isfinite().all()


def test_packed_by_the_op(device, dtype):
    weight, x = weight_of(50, 33, dtype), randn(5, 3, 33, dtype=dtype)
    arguments = device.arguments(linear_arguments(x, weight))
    packed = device.call("pack_weight", weight=device.tensor(weight), format=arguments["format"])
    expected = device.call(OP, **arguments)
    assert torch.equal(device.call(OP, **(arguments | {"packed": packed})), expected)


def test_autocast_changes_nothing(device):
    arguments = device.arguments(linear_arguments(randn(5, 3, 33), weight_of(50, 33, torch.float)))
    expected = device.call(OP, **arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(device.call(OP, **arguments), expected)


@pytest.fixture(params=[False, True], ids=["float_activation", "int8_activation"])
def int8_activation(request):
    return request.param


def check_quantized(device, x, named, weight, int8_activation, bias=None):
    """Against float64 on what the weight was rounded to, and x where that is rounded too."""
    arguments = {"x": x, **named, "int8_activation": int8_activation, "bias": bias}
    out = device.call(OP, **device.arguments(arguments))
    assert out.shape == (*x.shape[:-1], weight.size(0))
    assert out.dtype == x.dtype and out.is_contiguous()
    met = quantized.int8_activation(x) if int8_activation else x
    exact = functional.linear(
        met.double(), weight.double(), None if bias is None else bias.double()
    )
    same = functional.linear(met.float(), weight, None if bias is None else bias.float())
    assert_accurate(out, exact, same.to(x.dtype))


@pytest.mark.parametrize("case", QUANTIZED, ids=format_id)
@pytest.mark.parametrize("rows, cols", [(1, 33), (7, 100), (17, 257), (40, 1000)])
def test_quantized_sizes(device, case, int8_activation, rows, cols):
    named, weight = packed_weight(case, rows, cols)
    for tokens in (1, 3):
        x = randn(5, tokens, weight.size(1))
        check_quantized(device, x, named, weight, int8_activation)


@pytest.mark.parametrize("case", QUANTIZED, ids=format_id)
@pytest.mark.parametrize("tokens", [*range(1, 14), 64, 257])
def test_quantized_tokens(device, case, int8_activation, tokens):
    named, weight = packed_weight(case, 40, 100)
    x = randn(5, tokens, weight.size(1), dtype=torch.bfloat16)
    check_quantized(device, x, named, weight, int8_activation)


@pytest.mark.parametrize("case", QUANTIZED, ids=format_id)
def test_quantized_dtypes_and_biases(device, case, dtype, int8_activation):
    named, weight = packed_weight(case, 19, 70)
    x = randn(5, 2, 3, weight.size(1), dtype=dtype)
    for bias in (randn(6, 19, dtype=dtype), randn(6, 19)):
        check_quantized(device, x, named, weight, int8_activation, bias)


@pytest.mark.parametrize("case", QUANTIZED, ids=format_id)
def test_quantized_extremes(device, case, int8_activation):
    """Every quant and every activation at its end: 16-bit sums of two products would saturate."""
    named, weight = packed_weight(case, 16, 256)
    x = torch.where(weight[:4] > 0, 1.0, -1.0)
    check_quantized(device, torch.cat((x, -x)), named, weight, int8_activation)
    check_quantized(device, torch.ones(1, weight.size(1)), named, weight, int8_activation)


@pytest.mark.parametrize("case", QUANTIZED, ids=format_id)
def test_quantized_tokens_do_not_meet(device, case, int8_activation):
    """NaN and inf in one token show in its row and leave the others as they are."""
    named, weight = packed_weight(case, 40, 100)
    x = randn(5, 9, weight.size(1))
    arguments = {"x": x, **named, "int8_activation": int8_activation}
    clean = device.call(OP, **device.arguments(arguments)).cpu()
    for token, poison in ((0, float("nan")), (4, float("inf")), (8, float("-inf"))):
        x[token, 37] = poison
    out = device.call(OP, **device.arguments(arguments)).cpu()
    assert not out[[0, 4, 8]].isfinite().any() and out[0].isnan().all()
    if int8_activation:
        assert out[[4, 8]].isnan().all()
    others = [1, 2, 3, 5, 6, 7]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("case", ROUNDED, ids=format_id)
def test_quantized_nan_in_a_weight_propagates(device, case, int8_activation):
    weight = weight_of(50, 100, torch.float32)
    weight[17, 99] = float("nan")
    packed_format, group_size = case
    options = {"format": int(packed_format), "group_size": group_size}
    packed = reference.pack_weight(weight, **options)
    arguments = {
        "x": randn(5, 2, 100),
        "packed": packed,
        "rows": 50,
        "int8_activation": int8_activation,
        **options,
    }
    out = device.call(OP, **device.arguments(arguments))
    assert out[:, 17].isnan().all()
    assert out[:, [*range(17), *range(18, 50)]].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-38, 1e30])
def test_int8_activation_of_any_size(device, scale):
    named, weight = packed_weight((ops.PackedFormat.INT8, 0), 20, 64)
    x = randn(5, 2, 64) * scale
    arguments = {"x": x, **named, "int8_activation": True}
    out = device.call(OP, **device.arguments(arguments)).double().cpu()
    exact = functional.linear(x.double(), weight.double())
    assert (out - exact).abs().max() <= 0.02 * exact.abs().max() + 64 * 1e-44


def quantized_base():
    named, _ = packed_weight((ops.PackedFormat.INT4, 32), 18, 64)
    return {"x": randn(5, 3, 64), **named, "int8_activation": True}


QUANTIZED_WRONG = {
    "no_group": {"group_size": 0},
    "group_of_-1": {"group_size": -1},
    "group_of_48": {"group_size": 48},
    "another_group": {"group_size": 64},
    "another_format": {"format": 5},
    "q4_k": {"format": 7, "group_size": 0},
    "wider_x": {"x": randn(5, 3, 96)},
}


@pytest.mark.parametrize("name", QUANTIZED_WRONG)
def test_refuses_quantized(device_family, name):
    arguments = device_family.arguments(quantized_base() | QUANTIZED_WRONG[name])
    assert_refused(lambda: device_family.call(OP, **arguments), ValueError, OP, "packed")


def base():
    x, weight = randn(5, 3, 20, dtype=torch.bfloat16), weight_of(18, 20, torch.bfloat16)
    return linear_arguments(x, weight, randn(6, 18, dtype=torch.bfloat16))


changed, each = partial(errors.changed, base), partial(errors.each, base)
LINEAR = torch.zeros(18, 20, dtype=torch.bfloat16)

WRONG = {
    **{
        f"no_{name}": (TypeError, f"{name} must be a tensor, got None", changed(**{name: None}))
        for name in ("x", "packed")
    },
    "no_columns": (ValueError, "x", changed(x=torch.tensor(1.0, dtype=torch.bfloat16))),
    "empty_columns": (ValueError, "x", each(lambda t: t[:, :0], "x")),
    "float64_x": (TypeError, "x", each(torch.Tensor.double, "x")),
    "integer_x": (TypeError, "x", each(torch.Tensor.int, "x")),
    "float32_x_for_bfloat16_weights": (TypeError, "x", each(torch.Tensor.float, "x")),
    "wider_x": (ValueError, "x|packed", each(lambda t: torch.cat((t, t), -1), "x")),
    "stride_of_x": (ValueError, "x", each(every_other, "x")),
    "unpacked": (TypeError, "packed", changed(packed=LINEAR)),
    "unpacked_bytes": (ValueError, "packed", changed(packed=LINEAR.view(torch.uint8))),
    "rank_4": (ValueError, "packed", each(lambda t: t.view(1, 1, 2, -1), "packed")),
    "one_byte_short": (ValueError, "packed", each(lambda t: t[:-1], "packed")),
    "one_panel_short": (ValueError, "packed", each(lambda t: t[: t.numel() // 2], "packed")),
    "every_other_byte": (
        ValueError,
        "packed",
        each(lambda t: t.repeat_interleave(2)[::2], "packed"),
    ),
    "unknown_format": (ValueError, "format", changed(format=99)),
    "negative_format": (ValueError, "format", changed(format=-1)),
    "format_of_another_dtype": (TypeError, "x", changed(format=2)),
    "no_rows": (ValueError, "rows", changed(rows=0)),
    "negative_rows": (ValueError, "rows", changed(rows=-18)),
    "rows_that_wrap": (ValueError, "rows", changed(rows=(1 << 63) - 1)),
    "more_rows": (ValueError, "packed", changed(rows=40)),
    "group_of_48": (ValueError, "packed", changed(group_size=48)),
    "group_of_-1": (ValueError, "packed", changed(group_size=-1)),
    "int8_activation": (ValueError, "int8_activation", changed(int8_activation=True)),
    "bias_for_17_of_18_rows": (ValueError, "bias", each(lambda t: t[1:], "bias")),
    "rank_of_bias": (ValueError, "bias", each(lambda t: t.view(1, -1), "bias")),
    "empty_bias": (ValueError, "bias", each(lambda t: t[:0], "bias")),
    "float16_bias": (TypeError, "bias", each(torch.Tensor.half, "bias")),
    **{
        f"meta_{name}": (TypeError, f"{name}|x|packed", each(lambda t: t.to("meta"), name))
        for name in ("x", "packed", "bias")
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(device_family, name):
    exception, argument, make = WRONG[name]
    arguments = device_family.arguments(make())
    assert_refused(lambda: device_family.call(OP, **arguments), exception, OP, argument)


def test_refuses_unaligned_weights(device_family):
    arguments = device_family.arguments(base())
    size = arguments["packed"].numel()
    moved = device_family.tensor(torch.zeros(size + 64, dtype=torch.uint8))[2:][:size]
    message = assert_refused(
        lambda: device_family.call(OP, **(arguments | {"packed": moved})), ValueError, OP, "packed"
    )
    assert "64-byte" in message


@pytest.mark.parametrize("name", ["x", "bias"])
def test_refuses_gradients(device_family, name):
    arguments = device_family.arguments(base())
    arguments[name].requires_grad_()
    message = assert_refused(lambda: device_family.call(OP, **arguments), RuntimeError, OP, name)
    assert "inference only" in message
