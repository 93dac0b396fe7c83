"""packed_embedding: rows of the weight, exactly, and wrong calls."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fasttps import ops, reference
from tests.support import errors
from tests.support.attention import randn
from tests.support.errors import assert_refused
from tests.support.quantized import QUANTIZED, format_id, packed_weight

OP = "packed_embedding"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


def embedding_arguments(ids, weight, dtype):
    packed_format = int(ops.PackedFormat.of(weight.dtype))
    return {
        "ids": ids,
        "packed": reference.pack_weight(weight, format=packed_format),
        "format": packed_format,
        "rows": weight.size(0),
        "cols": weight.size(1),
        "dtype": dtype,
    }


@pytest.mark.parametrize("rows, cols", [(1, 1), (7, 17), (16, 16), (33, 100), (50, 33)])
@pytest.mark.parametrize("held", DTYPES, ids=str)
def test_all_rows(device, dtype, held, rows, cols):
    """Every row, in an order of their own; each value rounded once."""
    weight = randn(0, rows, cols, dtype=held)
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    out = device.call(OP, **device.arguments(embedding_arguments(ids, weight, dtype)))
    assert out.dtype == dtype and out.is_contiguous()
    assert torch.equal(out.cpu(), weight[ids].to(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2, 0), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("of_ids", [torch.int64, torch.int32], ids=str)
def test_shapes_of_ids(device, shape, of_ids):
    weight = randn(0, 20, 9, dtype=torch.bfloat16)
    ids = torch.randint(20, shape, generator=torch.Generator().manual_seed(2), dtype=of_ids)
    out = device.call(OP, **device.arguments(embedding_arguments(ids, weight, torch.bfloat16)))
    assert torch.equal(out.cpu(), weight[ids.long()])


def test_strides_of_ids(device):
    weight, ids = randn(0, 20, 9), torch.arange(20).view(4, 5).t()[::2]
    out = device.call(OP, **device.arguments(embedding_arguments(ids, weight, torch.float32)))
    assert out.is_contiguous() and torch.equal(out.cpu(), weight[ids])


def test_nan_and_infinity_stay(device, dtype):
    weight = torch.tensor([[float("nan"), float("inf")], [float("-inf"), -0.0]])
    out = device.call(
        OP, **device.arguments(embedding_arguments(torch.tensor([0, 1]), weight, dtype))
    ).cpu()
    assert out[0, 0].isnan() and out[0, 1] == float("inf") and out[1, 0] == float("-inf")
    assert out[1, 1] == 0 and out[1, 1].signbit()


@pytest.mark.parametrize("case", QUANTIZED, ids=format_id)
def test_quantized_rows(device, case, dtype):
    named, weight = packed_weight(case, 35, 100)
    ids = torch.tensor([[0, 34], [17, 15], [16, 3]])
    arguments = {"ids": ids, **named, "cols": weight.size(1), "dtype": dtype}
    out = device.call(OP, **device.arguments(arguments))
    assert torch.equal(out.cpu(), weight[ids].to(dtype))


def base():
    weight = randn(0, 20, 6, dtype=torch.bfloat16)
    return embedding_arguments(torch.tensor([0, 19, 3]), weight, torch.bfloat16)


changed, each = partial(errors.changed, base), partial(errors.each, base)

WRONG = {
    **{
        f"no_{name}": (TypeError, f"{name} must be a tensor, got None", changed(**{name: None}))
        for name in ("ids", "packed")
    },
    "float_ids": (TypeError, "ids", each(torch.Tensor.float, "ids")),
    "int8_ids": (TypeError, "ids", each(lambda t: t.to(torch.int8), "ids")),
    "id_past_the_rows": (ValueError, "ids", changed(ids=torch.tensor([0, 20]))),
    "id_in_the_padding": (ValueError, "ids", changed(ids=torch.tensor([31]))),
    "negative_id": (ValueError, "ids", changed(ids=torch.tensor([-1], dtype=torch.int32))),
    "unpacked": (TypeError, "packed", changed(packed=torch.zeros(20, 6))),
    "rank_2": (ValueError, "packed", each(lambda t: t.view(2, -1), "packed")),
    "one_byte_short": (ValueError, "packed", each(lambda t: t[:-1], "packed")),
    "unknown_format": (ValueError, "format", changed(format=99)),
    "no_rows": (ValueError, "rows", changed(rows=0)),
    "rows_that_wrap": (ValueError, "rows", changed(rows=(1 << 63) - 1)),
    "more_rows": (ValueError, "packed", changed(rows=40)),
    "no_columns": (ValueError, "cols", changed(cols=0)),
    "columns_that_wrap": (ValueError, "cols", changed(cols=(1 << 63) - 1)),
    "more_columns": (ValueError, "packed", changed(cols=9)),
    "group_of_32": (ValueError, "packed", changed(group_size=32)),
    "float64": (TypeError, "dtype", changed(dtype=torch.float64)),
    "integer_dtype": (TypeError, "dtype", changed(dtype=torch.int8)),
    "meta_packed": (TypeError, "packed|ids", each(lambda t: t.to("meta"), "packed")),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(device_family, name):
    exception, argument, make = WRONG[name]
    arguments = device_family.arguments(make())
    assert_refused(lambda: device_family.call(OP, **arguments), exception, OP, argument)
