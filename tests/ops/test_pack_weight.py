"""The packed layout: its bytes, and that packing and unpacking are exact.

Formats that round: test_quantized_weights.py.
"""

from __future__ import annotations

import struct
from functools import partial

import pytest
import torch

from fasttps import ops, reference
from fasttps.reference.pack_weight import FORMAT_DTYPES
from tests.support import errors
from tests.support.attention import randn
from tests.support.errors import assert_refused, bits, every_other

FORMATS = [packed_format for packed_format in ops.PackedFormat if not packed_format.is_quantized]
SIZES = [(1, 1), (7, 17), (16, 16), (17, 33), (31, 100), (32, 2), (48, 64), (100, 7)]


@pytest.fixture(params=FORMATS, ids=lambda packed_format: packed_format.name)
def packed_format(request):
    return request.param


def numbers(seed, rows, cols, packed_format):
    return randn(seed, rows, cols, dtype=packed_format.dtype)


def pack(device, weight, packed_format):
    packed = device.call("pack_weight", weight=device.tensor(weight), format=packed_format)
    assert packed.dtype == torch.uint8 and packed.dim() == 1 and packed.is_contiguous()
    return packed


def pack_two(device, gate, up, packed_format):
    arguments = device.arguments({"gate": gate, "up": up})
    packed = device.call("pack_gate_up", **arguments, format=packed_format)
    assert packed.dtype == torch.uint8 and packed.dim() == 1 and packed.is_contiguous()
    return packed


def hexadecimal(packed):
    return bytes(packed.cpu().tolist()).hex()


# [[1, 2, 3], [4, 5, 6]]: rows 0 and 1 of a panel of 16.
GOLDEN = {
    ops.PackedFormat.F32: (
        "0000803f00008040" + "00" * 56  # column 0: 1, 4
        + "000000400000a040" + "00" * 56  # column 1: 2, 5
        + "000040400000c040" + "00" * 56  # column 2: 3, 6
    ),
    ops.PackedFormat.BF16: (
        "803f00408040a040" + "00" * 56  # columns 0 and 1: 1, 2 and 4, 5
        + "40400000c0400000" + "00" * 56  # column 2 and none: 3, 0 and 6, 0
    ),
    ops.PackedFormat.F16: (
        "003c004000440045" + "00" * 56
        + "0042000000460000" + "00" * 56
    ),
}  # fmt: skip


def test_golden_bytes(device, packed_format):
    weight = torch.arange(1.0, 7.0, dtype=packed_format.dtype).view(2, 3)
    assert hexadecimal(pack(device, weight, packed_format)) == GOLDEN[packed_format]


def test_golden_bytes_of_gate_and_up(device, packed_format):
    """20 rows: gate 0..15, up 0..15, gate 16..19, up 16..19."""
    weight = torch.arange(1.0, 7.0, dtype=packed_format.dtype).view(2, 3)
    zeros = torch.zeros(16, 3, dtype=packed_format.dtype)
    low, high = torch.cat((weight, zeros))[:20], torch.cat((zeros, weight))[:20]
    golden, empty = GOLDEN[packed_format], "00" * (len(GOLDEN[packed_format]) // 2)
    packed = pack_two(device, low, high, packed_format)
    assert hexadecimal(packed) == golden + empty + empty + golden


def bytes_by_definition(weight, packed_format):
    """One element after the other, without torch's layout functions."""
    rows, cols = weight.shape
    run = 1 if packed_format is ops.PackedFormat.F32 else 2
    runs, panels = -(-cols // run), -(-rows // 16)
    elements = [b"\0" * (4 // run)] * (panels * runs * 16 * run)
    for r in range(rows):
        for c in range(cols):
            value = float(weight[r, c])
            if packed_format is ops.PackedFormat.F32:
                element = struct.pack("<f", value)
            elif packed_format is ops.PackedFormat.BF16:
                element = struct.pack("<f", value)[2:]
            else:
                element = struct.pack("<e", value)
            panel, row = divmod(r, 16)
            elements[((panel * runs + c // run) * 16 + row) * run + c % run] = element
    return b"".join(elements)


@pytest.mark.parametrize("rows, cols", SIZES)
def test_bytes_by_definition(device, packed_format, rows, cols):
    weight = numbers(0, rows, cols, packed_format)
    packed = pack(device, weight, packed_format)
    assert bytes(packed.cpu().tolist()) == bytes_by_definition(weight, packed_format)


@pytest.mark.parametrize("rows, cols", SIZES)
def test_gate_and_up_are_panels_in_turn(device, packed_format, rows, cols):
    gate, up = (numbers(seed, rows, cols, packed_format) for seed in (0, 1))
    panels = pack_two(device, gate, up, packed_format).cpu().view(-(-rows // 16), 2, -1)
    for half, weight in enumerate((gate, up)):
        assert torch.equal(panels[:, half].flatten(), pack(device, weight, packed_format).cpu())


@pytest.mark.parametrize("rows, cols", [*SIZES, (0, 4), (4, 0)])
def test_round_trip_is_exact(device, packed_format, rows, cols):
    gate, up = (numbers(seed, rows, cols, packed_format) for seed in (0, 1))
    shape = {"format": packed_format, "rows": rows, "cols": cols}
    packed = pack(device, gate, packed_format)
    weight = device.call("unpack_weight", packed=packed, **shape)
    both = device.call("unpack_gate_up", packed=pack_two(device, gate, up, packed_format), **shape)
    for result, expected in zip((weight, *both), (gate, gate, up)):
        assert result.dtype == packed_format.dtype and result.is_contiguous()
        assert torch.equal(bits(result), bits(expected))


def test_round_trip_keeps_every_16_bit_pattern(device):
    """NaN payloads, denormals and signed zeros: undoing a patch is exact."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(256, 256)
    for packed_format in (ops.PackedFormat.BF16, ops.PackedFormat.F16):
        weight = patterns.view(packed_format.dtype)
        packed = pack(device, weight, packed_format)
        result = device.call(
            "unpack_weight", packed=packed, format=packed_format, rows=256, cols=256
        )
        assert torch.equal(bits(result), bits(weight))


def test_rows_at_any_distance(device, packed_format):
    weight = numbers(0, 40, 50, packed_format)[3:36:2, 5:38]
    dense = pack(device, weight.clone(), packed_format)
    assert torch.equal(pack(device, weight, packed_format), dense)
    halves = numbers(1, 34, 33, packed_format).unflatten(0, (2, 17)).unbind(0)
    assert torch.equal(
        pack_two(device, *halves, packed_format),
        pack_two(device, *(half.clone() for half in halves), packed_format),
    )


def test_packed_weights_are_aligned(device, packed_format):
    for rows, cols in SIZES:
        packed = pack(device, numbers(0, rows, cols, packed_format), packed_format)
        assert packed.data_ptr() % 64 == 0


def test_twins_agree_with_the_format_numbers():
    for packed_format in FORMATS:
        assert FORMAT_DTYPES[packed_format] == packed_format.dtype
        assert ops.PackedFormat.of(packed_format.dtype) is packed_format
    assert len(FORMATS) == len(FORMAT_DTYPES)
    assert reference.LAYOUT_VERSION == ops.LAYOUT_VERSION == 1
    with pytest.raises(TypeError, match=r"PackedFormat\.of: dtype .* got torch\.float64"):
        ops.PackedFormat.of(torch.float64)


def weight_arguments():
    return {"weight": randn(0, 20, 6, dtype=torch.bfloat16), "format": 1}


def gate_up_arguments():
    gate, up = (randn(seed, 20, 6, dtype=torch.bfloat16) for seed in (0, 1))
    return {"gate": gate, "up": up, "format": 1}


def packed_arguments():
    packed = reference.pack_weight(**weight_arguments())
    return {"packed": packed, "format": 1, "rows": 20, "cols": 6}


def packed_gate_up_arguments():
    packed = reference.pack_gate_up(**gate_up_arguments())
    return {"packed": packed, "format": 1, "rows": 20, "cols": 6}


def cases(op, base, table):
    changed, each = partial(errors.changed, base), partial(errors.each, base)
    return {f"{op}-{name}": (op, *case) for name, case in table(changed, each).items()}


def wrong_weight(argument):
    def table(changed, each):
        return {
            "vector": (ValueError, argument, each(lambda t: t[0], argument)),
            "rank_4": (ValueError, argument, each(lambda t: t[None, None], argument)),
            "float32": (TypeError, argument, each(torch.Tensor.float, argument)),
            "float64": (TypeError, argument, each(torch.Tensor.double, argument)),
            "stride_of_the_columns": (ValueError, argument, each(every_other, argument)),
            "format_10": (ValueError, "format", changed(format=10)),
            "format_-1": (ValueError, "format", changed(format=-1)),
            "format_of_another_dtype": (TypeError, "gate|weight", changed(format=2)),
        }

    return table


def wrong_packed(changed, each):
    shifted = torch.zeros(20 * 16 * 8, dtype=torch.uint8)
    wanted = packed_arguments()["packed"].numel()
    return {
        "unpacked": (TypeError, "packed", changed(packed=weight_arguments()["weight"])),
        "int8": (TypeError, "packed", each(lambda t: t.view(torch.int8), "packed")),
        "rank_2": (ValueError, "packed", each(lambda t: t.view(2, -1), "packed")),
        "one_byte_short": (ValueError, "packed", each(lambda t: t[:-1], "packed")),
        "empty": (ValueError, "packed", each(lambda t: t[:0], "packed")),
        "every_other_byte": (ValueError, "packed", changed(packed=shifted[: 2 * wanted : 2])),
        "format_10": (ValueError, "format", changed(format=10)),
        "format_of_4_bytes": (ValueError, "packed", changed(format=0)),
        "more_rows": (ValueError, "packed", changed(rows=33)),
        "more_columns": (ValueError, "packed", changed(cols=7)),
        "negative_rows": (ValueError, "rows", changed(rows=-1)),
        "negative_columns": (ValueError, "cols", changed(cols=-6)),
        "size_that_wraps": (ValueError, "rows|cols|packed", changed(rows=1 << 62, cols=1 << 3)),
        "rows_that_wrap": (ValueError, "rows|packed", changed(rows=(1 << 63) - 1)),
        "columns_that_wrap": (ValueError, "cols|packed", changed(cols=(1 << 63) - 1)),
        "group_of_48": (ValueError, "packed", changed(group_size=48)),
        "group_of_-1": (ValueError, "packed", changed(group_size=-1)),
    }


WRONG = {
    **cases("pack_weight", weight_arguments, wrong_weight("weight")),
    **cases("pack_gate_up", gate_up_arguments, wrong_weight("gate")),
    **cases(
        "pack_gate_up",
        gate_up_arguments,
        lambda changed, each: {
            "fewer_rows_in_up": (ValueError, "up", each(lambda t: t[:19], "up")),
            "dtype_of_up": (TypeError, "up", each(torch.Tensor.half, "up")),
            "stride_of_up": (ValueError, "up", each(every_other, "up")),
            "meta_up": (TypeError, "up", each(lambda t: t.to("meta"), "up")),
            "meta_gate": (TypeError, "up|gate", each(lambda t: t.to("meta"), "gate")),
        },
    ),
    **cases("unpack_weight", packed_arguments, wrong_packed),
    **cases("unpack_gate_up", packed_gate_up_arguments, wrong_packed),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(device_family, name):
    op, exception, argument, make = WRONG[name]
    arguments = device_family.arguments(make())
    assert_refused(lambda: device_family.call(op, **arguments), exception, op, argument)


@pytest.mark.parametrize("op", ["unpack_weight", "unpack_gate_up"])
def test_refuses_unaligned_bytes(device_family, op):
    arguments = packed_arguments() if op == "unpack_weight" else packed_gate_up_arguments()
    size = arguments["packed"].numel()
    for shift in (1, 4, 32):
        moved = device_family.tensor(torch.zeros(size + 64, dtype=torch.uint8))[shift:][:size]
        message = assert_refused(
            lambda moved=moved: device_family.call(op, **(arguments | {"packed": moved})),
            ValueError,
            op,
            "packed",
        )
        assert "64-byte" in message


@pytest.mark.parametrize("op, argument", [("pack_weight", "weight"), ("pack_gate_up", "up")])
def test_refuses_gradients(device_family, op, argument):
    """A parameter is packed under no_grad, or not at all."""
    arguments = weight_arguments() if op == "pack_weight" else gate_up_arguments()
    arguments = device_family.arguments(arguments)
    arguments[argument].requires_grad_()
    message = assert_refused(
        lambda: device_family.call(op, **arguments), RuntimeError, op, argument
    )
    assert "inference only" in message
    with torch.no_grad():
        assert not device_family.call(op, **arguments).requires_grad
