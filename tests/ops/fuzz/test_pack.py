"""Random calls of the ops that pack and unpack weights, valid and wrong: bytes of the twin."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.attention import randn
from tests.support.errors import bits
from tests.support.fuzz import (
    check_spoiled_calls,
    devices,
    many,
    seeds,
    several_strides,
    twin,
)
from tests.support.quantized import GGUF_BLOCKS, GGUF_NAMES, ROUNDED, Format, gguf_blocks

counts = st.integers(0, 70)
EXACT = [packed_format for packed_format in Format if not packed_format.is_quantized]
CASES = [*((packed_format, 0) for packed_format in EXACT), *ROUNDED]
STRANGE = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38, -3e38, 65504.0, 1e-7]


@st.composite
def weights(draw, packed_format, rows, cols):
    """Normal numbers of any size, with strange ones among them, rows at any distance."""
    dtype = packed_format.dtype
    if packed_format.is_quantized:
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    scale = draw(st.sampled_from([1.0, 1e-2, 1e-6, 1e-20, 1e-38, 1e4, 1e18, 1e37]))
    weight = randn(draw(seeds), rows, cols).mul(scale).to(dtype)
    if weight.numel():
        for _ in range(draw(st.integers(0, 3))):
            at = draw(st.integers(0, weight.numel() - 1))
            weight.view(-1)[at] = draw(st.sampled_from(STRANGE))
    return several_strides(draw, weight, (0,))


@st.composite
def pack_calls(draw):
    """(op, keyword arguments, size of the weight) of pack_weight and pack_gate_up."""
    packed_format, group_size = draw(st.sampled_from(CASES))
    rows, cols = draw(counts), draw(st.one_of(counts, st.sampled_from([128, 257])))
    options = {"format": int(packed_format), "group_size": group_size}
    strategy = weights(packed_format, rows, cols)
    weight = draw(strategy)
    if draw(st.booleans()):
        return "pack_weight", {"weight": weight, **options}, (rows, cols)
    up = draw(strategy).to(weight.dtype)
    return "pack_gate_up", {"gate": weight, "up": up, **options}, (rows, cols)


def assert_same(ours, theirs):
    ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
    for one, other in zip(ours, theirs):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(0), other.nan_to_num(0))


def test_valid_packing():
    @many
    @given(devices, pack_calls())
    def check(device, call):
        op, arguments, (rows, cols) = call
        unpack = op.replace("pack", "unpack")
        options = {name: arguments[name] for name in ("format", "group_size")}
        with device.active():
            packed = device.call(op, **device.arguments(arguments))
            assert_same(packed, twin(op, arguments))
            held = device.call(unpack, packed=packed, rows=rows, cols=cols, **options)
        shape = {"packed": packed, "rows": rows, "cols": cols}
        assert_same(held, twin(unpack, shape | options))
        if not Format(arguments["format"]).is_quantized:
            kept = held if isinstance(held, tuple) else (held,)
            weights = [arguments[n] for n in ("weight", "gate", "up") if n in arguments]
            for weight, half in zip(weights, kept):
                assert torch.equal(bits(half), bits(weight))

    check()


@st.composite
def gguf_calls(draw):
    """Blocks of the sizes that files have, and such of which every bit is random."""
    packed_format = draw(st.sampled_from(list(GGUF_NAMES)))
    block_cols, block_bytes, _ = GGUF_BLOCKS[packed_format]
    rows, blocks = draw(st.integers(0, 40)), draw(st.integers(0, 3))
    if rows and blocks and draw(st.booleans()):
        bytes_of = gguf_blocks(packed_format, rows, blocks * block_cols, draw(seeds))
    else:
        generator = torch.Generator().manual_seed(draw(seeds))
        shape = (rows, blocks * block_bytes)
        bytes_of = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return {
        "blocks": bytes_of,
        "format": int(packed_format),
        "rows": rows,
        "cols": blocks * block_cols,
    }


def test_valid_gguf():
    @many
    @given(devices, gguf_calls())
    def check(device, call):
        group_size = Format(call["format"]).group_sizes[0]
        shape = {"format": call["format"], "rows": call["rows"], "cols": call["cols"]}
        with device.active():
            packed = device.call("pack_gguf", **device.arguments(call))
            assert_same(packed, twin("pack_gguf", call))
            shape |= {"packed": packed, "group_size": group_size}
            assert_same(device.call("unpack_weight", **shape), twin("unpack_weight", shape))

    check()


QUANTS = [
    (packed_format, group_size)
    for packed_format in (Format.INT8, Format.INT4, Format.INT8_GROUP, Format.INT4_ZERO)
    for group_size in packed_format.group_sizes
]


@st.composite
def quants_calls(draw):
    """Quants of every value, with scales of any size and sign, in some strides."""
    packed_format, group_size = draw(st.sampled_from(QUANTS))
    rows, cols = draw(counts), draw(counts)
    groups = -(-cols // group_size) if group_size else 1
    four_bits = packed_format in (Format.INT4, Format.INT4_ZERO)
    generator = torch.Generator().manual_seed(draw(seeds))
    shape, most = (rows, cols), 16 if four_bits else 256
    quants = torch.randint(most, shape, generator=generator, dtype=torch.uint8)
    scales = randn(draw(seeds), rows, groups) * draw(st.sampled_from([1.0, 1e-3, 1e-7, 1e3]))
    call = {
        "quants": several_strides(draw, quants, (0, 1)),
        "scales": scales if packed_format == Format.INT8 else scales.half(),
        "format": int(packed_format),
        "group_size": group_size,
    }
    if packed_format == Format.INT4_ZERO:
        zeros = torch.randint(128, (rows, groups), generator=generator, dtype=torch.uint8)
        call["zeros"] = zeros
    return call


def test_valid_quants():
    @many
    @given(devices, quants_calls())
    def check(device, call):
        options = {name: call[name] for name in ("format", "group_size")}
        shape = dict(zip(("rows", "cols"), call["quants"].shape))
        with device.active():
            packed = device.call("pack_quants", **device.arguments(call))
            assert_same(packed, twin("pack_quants", call))
            held = {"packed": packed, **options, **shape}
            assert_same(device.call("unpack_weight", **held), twin("unpack_weight", held))

    check()


def test_spoiled_packing():
    check_spoiled_calls(pack_calls().map(lambda call: call[:2]), assert_same)


@st.composite
def unpack_calls(draw):
    op, arguments, (rows, cols) = draw(pack_calls())
    options = {name: arguments[name] for name in ("format", "group_size")}
    held = {"packed": twin(op, arguments), "rows": rows, "cols": cols, **options}
    return op.replace("pack", "unpack"), held


def test_spoiled_unpacking():
    check_spoiled_calls(unpack_calls(), assert_same)


def test_spoiled_gguf():
    check_spoiled_calls(gguf_calls().map(lambda call: ("pack_gguf", call)), assert_same)


def test_spoiled_quants():
    check_spoiled_calls(quants_calls().map(lambda call: ("pack_quants", call)), assert_same)
