"""pack_quants: the weights to the last bit, their layout, and wrong calls."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fasttps import reference
from tests.support import errors
from tests.support.attention import randn
from tests.support.errors import assert_refused
from tests.support.quantized import Format, format_id

OP = "pack_quants"
CASES = [
    (packed_format, group_size)
    for packed_format in (Format.INT8, Format.INT4, Format.INT8_GROUP, Format.INT4_ZERO)
    for group_size in packed_format.group_sizes
]
SIZES = [(1, 128), (16, 256), (17, 100), (37, 1)]


@pytest.fixture(params=CASES, ids=format_id)
def case(request):
    return request.param


def quants_of(case, rows, cols, seed=0):
    """Arguments with every quant and every zero point, and the weight in float64."""
    packed_format, group_size = case
    generator = torch.Generator().manual_seed(seed)
    bits = 4 if packed_format in (Format.INT4, Format.INT4_ZERO) else 8
    quants = torch.randint(1 << bits, (rows, cols), generator=generator, dtype=torch.uint8)
    groups = -(-cols // group_size) if group_size else 1
    scales = randn(seed + 1, rows, groups).mul(1e-2)
    scales = scales if packed_format == Format.INT8 else scales.half()
    arguments = {"quants": quants, "scales": scales, "format": int(packed_format)}
    arguments["group_size"] = group_size
    z = torch.full((rows, groups), {Format.INT4: 8}.get(packed_format, 128))
    if packed_format == Format.INT4_ZERO:
        z = torch.randint(18, (rows, groups), generator=generator)
        z[-1, -1] = 127
        arguments["zeros"] = z.to(torch.uint8)
    d, z = (t.double().repeat_interleave(group_size or cols, 1)[:, :cols] for t in (scales, z))
    return arguments, d * (quants.double() - z)


@pytest.mark.parametrize("rows, cols", SIZES)
def test_weights_are_exact(device, case, rows, cols):
    arguments, exact = quants_of(case, rows, cols, seed=rows)
    packed = device.call(OP, **device.arguments(arguments))
    assert packed.dtype == torch.uint8 and packed.dim() == 1 and packed.is_contiguous()
    options = {"rows": rows, "cols": cols, "group_size": case[1], "format": case[0]}
    weight = device.call("unpack_weight", packed=packed, **options)
    # A float32 scale of 24 bits times 8 bits of quant is rounded once.
    assert torch.equal(weight.cpu(), exact.float())


@pytest.mark.parametrize("rows, cols", SIZES)
def test_bytes_are_those_of_the_twin(device, case, rows, cols):
    arguments, _ = quants_of(case, rows, cols, seed=rows)
    expected = reference.pack_quants(**arguments)
    assert torch.equal(device.call(OP, **device.arguments(arguments)).cpu(), expected)


def test_bytes_are_those_of_pack_weight(device):
    """A weight on the grid: the scale that it finds is the one that it was made with."""
    quants = torch.randint(16, (20, 64), generator=torch.Generator().manual_seed(0))
    quants[:, ::32] = 0
    arguments = {"format": Format.INT4, "group_size": 32}
    packed = device.call("pack_weight", weight=device.tensor((quants - 8) * 0.125), **arguments)
    arguments["quants"] = quants.to(torch.uint8)
    arguments["scales"] = torch.full((20, 2), 0.125, dtype=torch.float16)
    assert torch.equal(device.call(OP, **device.arguments(arguments)), packed)


def test_int4_zero_by_hand(device):
    """The layout as it is written down, of one group of 32 columns and 16 rows."""
    row, col = torch.arange(16)[:, None], torch.arange(32)[None]
    quants = ((3 * row + col) % 16).to(torch.uint8)
    scales = (torch.arange(16) - 5).half()[:, None]
    zeros = torch.arange(16, dtype=torch.uint8)[:, None]
    arguments = {"quants": quants, "scales": scales, "zeros": zeros, "format": 9, "group_size": 32}
    packed = device.call(OP, **device.arguments(arguments)).cpu()
    nibbles = [
        int(quants[r, 4 * j + b]) | int(quants[r, 16 + 4 * j + b]) << 4
        for j in range(4)
        for r in range(16)
        for b in range(4)
    ]
    expected = [*nibbles, *scales.view(torch.uint8).flatten().tolist(), *range(16)]
    assert packed.tolist() == expected


def test_any_strides(device, case):
    arguments, _ = quants_of(case, 37, 100)
    expected = device.call(OP, **device.arguments(arguments))
    for name in ("quants", "scales", "zeros"):
        if name in arguments:
            transposed = device.tensor(arguments[name].t().contiguous()).t()
            out = device.call(OP, **device.arguments(arguments | {name: transposed}))
            assert torch.equal(out, expected)
    every_other = torch.stack((arguments["quants"],) * 2, -1)[..., 0]
    out = device.call(OP, **device.arguments(arguments | {"quants": every_other}))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("rows, cols", [(0, 64), (4, 0)])
def test_nothing_to_pack(device, case, rows, cols):
    packed_format, group_size = case
    groups = -(-cols // group_size) if group_size else 1
    scales = torch.zeros(rows, groups, dtype=torch.float16 if group_size else torch.float32)
    arguments = {"quants": torch.zeros(rows, cols, dtype=torch.uint8), "scales": scales}
    arguments |= {"format": packed_format, "group_size": group_size}
    if packed_format == Format.INT4_ZERO:
        arguments["zeros"] = torch.zeros(rows, groups, dtype=torch.uint8)
    assert device.call(OP, **device.arguments(arguments)).numel() == 0


def base():
    return quants_of((Format.INT4_ZERO, 32), 20, 70)[0]


changed, each = partial(errors.changed, base), partial(errors.each, base)

WRONG = {
    **{
        f"format_{number}": (ValueError, "format", changed(format=number))
        for number in (-1, 0, 1, 2, 5, 7, 8, 10)
    },
    "no_zeros": (ValueError, "zeros", changed(zeros=None)),
    "zeros_of_int4": (ValueError, "zeros", changed(format=4)),
    "group_of_16": (ValueError, "group size", changed(group_size=16)),
    "another_group": (ValueError, "scales", changed(group_size=64)),
    "scale_of_a_row": (ValueError, "scales", each(lambda t: t[:, :1], "scales")),
    "zero_of_a_row": (ValueError, "zeros", each(lambda t: t[:, :1], "zeros")),
    "a_row_less": (ValueError, "scales", each(lambda t: t[:-1], "quants")),
    "rank_1": (ValueError, "quants", each(torch.Tensor.flatten, "quants")),
    "rank_3": (ValueError, "scales", each(lambda t: t[None], "scales")),
    "quant_of_16": (ValueError, "quants", each(lambda t: t + 16, "quants")),
    "zero_of_128": (ValueError, "zeros", each(lambda t: t | 128, "zeros")),
    "int8_quants": (TypeError, "quants", each(torch.Tensor.char, "quants")),
    "int8_zeros": (TypeError, "zeros", each(torch.Tensor.char, "zeros")),
    "float32_scales": (TypeError, "scales", each(torch.Tensor.float, "scales")),
    "bfloat16_scales": (TypeError, "scales", each(torch.Tensor.bfloat16, "scales")),
    "meta_scales": (TypeError, "scales", each(lambda t: t.to("meta"), "scales")),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(device_family, name):
    exception, argument, make = WRONG[name]
    arguments = device_family.arguments(make())
    assert_refused(lambda: device_family.call(OP, **arguments), exception, OP, argument)
