"""pack_gguf: the weights of the blocks to the last bit, their layout, and wrong calls."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fasttps import reference
from tests.support import errors
from tests.support.attention import randn
from tests.support.errors import assert_refused
from tests.support.quantized import GGUF_BLOCKS, GGUF_NAMES, Format, gguf_blocks

OP = "pack_gguf"
SIZES = [(1, 256), (16, 512), (17, 256), (37, 768)]


@pytest.fixture(params=GGUF_NAMES, ids=lambda packed_format: GGUF_NAMES[packed_format])
def packed_format(request):
    return request.param


def pack(device, blocks, packed_format, rows, cols):
    packed = device.call(
        OP, blocks=device.tensor(blocks), format=packed_format, rows=rows, cols=cols
    )
    assert packed.dtype == torch.uint8 and packed.dim() == 1 and packed.is_contiguous()
    return packed


def unpack(device, packed, packed_format, rows, cols):
    options = {"rows": rows, "cols": cols, "group_size": packed_format.group_sizes[0]}
    return device.call("unpack_weight", packed=packed, format=packed_format, **options).cpu()


@pytest.mark.parametrize("rows, cols", SIZES)
def test_weights_are_those_of_gguf(device, packed_format, rows, cols):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    blocks = gguf_blocks(packed_format, rows, cols, seed=rows)
    kind = getattr(gguf.GGMLQuantizationType, GGUF_NAMES[packed_format])
    exact = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))
    packed = pack(device, blocks, packed_format, rows, cols)
    assert torch.equal(unpack(device, packed, packed_format, rows, cols), exact)


@pytest.mark.parametrize("rows, cols", SIZES)
def test_bytes_are_those_of_the_twin(device, packed_format, rows, cols):
    blocks = gguf_blocks(packed_format, rows, cols, seed=rows)
    expected = reference.pack_gguf(blocks, format=packed_format, rows=rows, cols=cols)
    assert torch.equal(pack(device, blocks, packed_format, rows, cols).cpu(), expected)


@pytest.mark.parametrize("rows, cols", SIZES)
def test_panels_can_be_written_in_turn(device, packed_format, rows, cols):
    """Every other panel of a larger weight; what lies between them stays as it is."""
    blocks = gguf_blocks(packed_format, rows, cols, seed=rows)
    expected = pack(device, blocks, packed_format, rows, cols).view(-(-rows // 16), -1)
    both = torch.full((expected.size(0), 2, expected.size(1)), 7, dtype=torch.uint8)
    both = device.tensor(both)
    options = {"format": packed_format, "rows": rows, "cols": cols}
    returned = device.call(OP, blocks=device.tensor(blocks), out=both[:, 1], **options)
    assert returned.data_ptr() == both[:, 1].data_ptr()
    assert torch.equal(both[:, 1], expected)
    assert (both[:, 0] == 7).all()


def test_packs_as_pack_weight_does(device):
    """A weight on the grid, as blocks and as floats."""
    q = torch.randint(0, 16, (3, 32), generator=torch.Generator().manual_seed(0))
    q[:, 0] = 0
    scale = torch.full((3, 1), 0.125, dtype=torch.float16).view(torch.uint8)
    blocks = torch.cat((scale, (q[:, :16] | q[:, 16:] << 4).to(torch.uint8)), 1)
    packed = pack(device, blocks, Format.INT4, 3, 32)
    weight = device.tensor((q - 8) * 0.125)
    assert torch.equal(packed, device.call("pack_weight", weight=weight, format=4, group_size=32))


def test_q4_k_by_hand(device):
    """d 2, dmin 0.5; sub-block s has sc s + 1 and mn 3 s, so that 6 bits need both halves."""
    sc, mn = torch.arange(8) * 9, torch.arange(8) * 3 + 40
    packed_scales = torch.zeros(12, dtype=torch.int64)
    for j in range(4):
        packed_scales[j] = sc[j] | sc[j + 4] >> 4 << 6
        packed_scales[j + 4] = mn[j] | mn[j + 4] >> 4 << 6
        packed_scales[j + 8] = sc[j + 4] & 15 | (mn[j + 4] & 15) << 4
    q = torch.arange(256) % 13
    halves = q.view(4, 2, 32)
    scales = torch.tensor([2.0, 0.5], dtype=torch.float16).view(torch.uint8)
    quants = (halves[:, 0] | halves[:, 1] << 4).flatten()
    blocks = torch.cat((scales, packed_scales.to(torch.uint8), quants.to(torch.uint8)))[None]
    packed = pack(device, blocks, Format.Q4_K, 1, 256)
    expected = (2.0 * sc[:, None] * q.view(8, 32) - 0.5 * mn[:, None]).flatten()
    assert torch.equal(unpack(device, packed, Format.Q4_K, 1, 256)[0], expected)


def test_q6_k_by_hand(device):
    q = (torch.arange(256) * 7) % 64
    sc = torch.arange(16) * 16 - 120
    low, high = q & 15, q >> 4
    ql = torch.cat([low[h : h + 64] | low[h + 64 : h + 128] << 4 for h in (0, 128)])
    qh = torch.cat(
        [sum(high[h + 32 * i : h + 32 * (i + 1)] << 2 * i for i in range(4)) for h in (0, 128)]
    )
    scales = sc.to(torch.int8).view(torch.uint8)
    d = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    blocks = torch.cat((ql.to(torch.uint8), qh.to(torch.uint8), scales, d))[None]
    packed = pack(device, blocks, Format.Q6_K, 1, 256)
    expected = (0.5 * sc[:, None] * (q.view(16, 16) - 32)).flatten()
    assert torch.equal(unpack(device, packed, Format.Q6_K, 1, 256)[0], expected)


@pytest.mark.parametrize("rows, cols", [(0, 256), (4, 0)])
def test_nothing_to_pack(device, packed_format, rows, cols):
    block_cols, block_bytes, _ = GGUF_BLOCKS[packed_format]
    blocks = torch.zeros(rows, cols // block_cols * block_bytes, dtype=torch.uint8)
    assert pack(device, blocks, packed_format, rows, cols).numel() == 0


def test_our_rounding_beats_that_of_gguf(device):
    """The squared error of the same weight in the same bits."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    weight = randn(1, 64, 512).mul(0.02)
    for packed_format in (Format.INT4, Format.INT4_MIN):
        kind = getattr(gguf.GGMLQuantizationType, GGUF_NAMES[packed_format])
        theirs = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
        packed = device.call(
            "pack_weight", weight=device.tensor(weight), format=packed_format, group_size=32
        )
        ours = unpack(device, packed, packed_format, 64, 512)
        error = float(((ours - weight) ** 2).mean())
        assert error < 0.93 * float(((torch.from_numpy(theirs) - weight) ** 2).mean())


def base():
    return {"blocks": gguf_blocks(Format.INT4, 20, 64), "format": 4, "rows": 20, "cols": 64}


changed, each = partial(errors.changed, base), partial(errors.each, base)


def out(*shape, dtype=torch.uint8):
    """`base` with an `out` of this shape; [2, 576] is the right one."""
    return changed(out=torch.zeros(shape, dtype=dtype))


WRONG = {
    "out_of_one_panel": (ValueError, "out", out(1, 576)),
    "out_of_other_bytes": (ValueError, "out", out(2, 575)),
    "out_flat": (ValueError, "out", out(1152)),
    "out_int8": (TypeError, "out", out(2, 576, dtype=torch.int8)),
    "out_apart_in_a_panel": (
        ValueError,
        "out",
        changed(out=torch.zeros(2, 1152, dtype=torch.uint8)[:, ::2]),
    ),
    "out_of_one_row": (
        ValueError,
        "out",
        changed(out=torch.zeros(1, 576, dtype=torch.uint8).expand(2, 576)),
    ),
    **{
        f"format_{number}": (ValueError, "format", changed(format=number))
        for number in (-1, 0, 1, 2, 3, 9, 10)
    },
    "another_format": (ValueError, "blocks", changed(format=5)),
    "q4_k_of_64_columns": (ValueError, "cols", changed(format=7)),
    "columns_not_in_blocks": (ValueError, "cols", changed(cols=48)),
    "more_columns": (ValueError, "blocks", changed(cols=96)),
    "more_rows": (ValueError, "blocks", changed(rows=21)),
    "negative_rows": (ValueError, "rows", changed(rows=-20)),
    "negative_columns": (ValueError, "cols", changed(cols=-64)),
    "rows_that_wrap": (ValueError, "rows", changed(rows=(1 << 63) - 1)),
    "columns_that_wrap": (ValueError, "cols", changed(cols=1 << 62)),
    "int8": (TypeError, "blocks", each(torch.Tensor.char, "blocks")),
    "float": (TypeError, "blocks", each(torch.Tensor.float, "blocks")),
    "vector": (ValueError, "blocks", each(torch.Tensor.flatten, "blocks")),
    "rank_3": (ValueError, "blocks", each(lambda t: t[None], "blocks")),
    "one_byte_short": (ValueError, "blocks", each(lambda t: t[:, :-1].contiguous(), "blocks")),
    "rows_apart": (
        ValueError,
        "blocks",
        each(lambda t: torch.cat((t, t), 1)[:, : t.size(1)], "blocks"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(device_family, name):
    exception, argument, make = WRONG[name]
    arguments = device_family.arguments(make())
    assert_refused(lambda: device_family.call(OP, **arguments), exception, OP, argument)
