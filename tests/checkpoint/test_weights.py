"""Quants and scales of other packages' checkpoints, bit for bit as those packages read them."""

from __future__ import annotations

import hashlib

import pytest
import torch

import fasttps
from fasttps import ops
from fasttps.checkpoint.load import open_folder
from fasttps.checkpoint.weights import Form, QuantizedWeight, common_form
from tests.support.attention import randn
from tests.support.checkpoints import NAMES, expected, fixture

INT4, INT4_ZERO = ops.PackedFormat.INT4, ops.PackedFormat.INT4_ZERO
INT8, INT8_GROUP = ops.PackedFormat.INT8, ops.PackedFormat.INT8_GROUP
ACT_ORDER = ("gptq-act-order", "gptq-v2", "gptq-8bit", "ct-act-order")

# The formats of q_proj and down_proj; none: packed in the model's dtype.
FORMS = {
    "awq": (Form(INT4_ZERO, 128), Form(INT4_ZERO, 128)),
    "awq-phi3": (Form(INT4_ZERO, 32), Form(INT4_ZERO, 32)),
    "awq-qwen2": (Form(INT4_ZERO, 32), Form(INT4_ZERO, 32)),
    "ct-act-order": (Form(INT4, 32), Form(INT4, 32)),
    "ct-float32": (None, None),  # a scale of 24 bits
    "ct-int4": (Form(INT4, 128), Form(INT4, 128)),
    "ct-int4-zero": (Form(INT4_ZERO, 32), Form(INT4_ZERO, 32)),
    "ct-int8-channel": (Form(INT8, 0), Form(INT8, 0)),
    "ct-int8-group": (Form(INT8, 0), Form(INT8_GROUP, 32)),  # 128 columns are one group
    "gptq-8bit": (Form(INT8, 0), Form(INT8_GROUP, 32)),
    "gptq-act-order": (Form(INT4_ZERO, 32), Form(INT4_ZERO, 32)),
    "gptq-auto-gptq": (Form(INT4_ZERO, 128), Form(INT4_ZERO, 128)),  # a scale a row
    "gptq-sym": (Form(INT4, 128), Form(INT4, 128)),
    "gptq-v2": (Form(INT4_ZERO, 64), Form(INT4_ZERO, 64)),
}


def sha(tensor):
    tensor = tensor + 0.0 if tensor.is_floating_point() else tensor  # no -0
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def own_columns(weight, tensor):
    return tensor if weight.columns is None else tensor[:, weight.columns.argsort()]


@pytest.mark.parametrize("name", NAMES)
def test_are_what_the_package_makes_of_them(name):
    model, tensors = open_folder(fixture(name))
    assert tensors.quantized == expected(name).keys()
    for linear, facts in expected(name).items():
        weight = tensors.weight(linear, *model.get_submodule(linear).weight.shape)
        assert sha(own_columns(weight, weight.quants)) == facts["quants"], linear
        # The product of a quant and a scale is exact in float32, and rounded once.
        assert sha(weight.values().to(getattr(torch, facts["dtype"]))) == facts["weight"], linear


@pytest.mark.parametrize("name", NAMES)
def test_are_packed_bit_for_bit(name):
    model, tensors = open_folder(fixture(name))
    linears = [next(n for n in expected(name) if part in n) for part in ("q", "down_proj")]
    for linear, form in zip(linears, FORMS[name]):
        weight = tensors.weight(linear, *model.get_submodule(linear).weight.shape)
        assert (weight.columns is not None) <= (name in ACT_ORDER)
        assert common_form([weight]) == form
        for other in weight.forms:
            rows, cols = weight.shape
            options = {"format": other.format, "rows": rows, "cols": cols}
            packed = weight.pack(other)
            made = ops.unpack_weight(packed, group_size=other.group_size, **options)
            assert torch.equal(own_columns(weight, made), weight.values())


def some_weight(bits=4, rows=20, cols=300, group=64, zeros=None, scales=None):
    generator = torch.Generator().manual_seed(0)
    quants = torch.randint(1 << bits, (rows, cols), generator=generator, dtype=torch.uint8)
    groups = -(-cols // group)
    scales = randn(1, rows, groups).half() if scales is None else scales
    if zeros is not None:
        zeros = torch.full((rows, groups), zeros, dtype=torch.uint8)
    return QuantizedWeight(bits, quants, scales, zeros, group)


@pytest.mark.parametrize(
    "arguments, formats",
    [
        ({"group": 128}, [Form(INT4, 128), Form(INT4_ZERO, 128)]),
        ({"group": 256}, [Form(INT4, 128), Form(INT4_ZERO, 128)]),
        ({"group": 96}, [Form(INT4, 32), Form(INT4_ZERO, 32)]),
        ({"group": 300}, [Form(INT4, 128), Form(INT4_ZERO, 128)]),
        ({"group": 32, "zeros": 8}, [Form(INT4, 32), Form(INT4_ZERO, 32)]),
        ({"group": 32, "zeros": 16}, [Form(INT4_ZERO, 32)]),
        ({"group": 16}, []),
        ({"group": 48}, []),
        ({"bits": 8, "group": 128}, [Form(INT8_GROUP, 32)]),
        ({"bits": 8, "group": 300}, [Form(INT8, 0)]),
        ({"bits": 8, "group": 300, "zeros": 127}, []),
        ({"bits": 8, "group": 48}, []),
    ],
)
def test_forms_hold_every_group_size(arguments, formats):
    weight = some_weight(**arguments)
    assert list(weight.forms) == formats
    for form in formats:
        packed = weight.pack(form)
        options = {"rows": 20, "cols": 300, "group_size": form.group_size}
        made = ops.unpack_weight(packed, format=form.format, **options)
        assert torch.equal(made, weight.values())


@pytest.mark.parametrize("scale, fits", [(2.0**-17, True), (2.0**-26, False), (1e5, False)])
def test_bfloat16_scales_are_taken_where_float16_has_them(scale, fits):
    scales = torch.full((20, 5), 1.5 * scale, dtype=torch.bfloat16)
    assert bool(some_weight(scales=scales).forms) == fits
    assert not some_weight(scales=scales.float() * (1 + 2**-20)).forms


def test_a_checkpoint_is_loaded_by_fasttps_load():
    model = fasttps.load(fixture("awq"))
    assert model.dtype == torch.float16 and not model.training
    assert model.model.layers[0].mlp.packed_gate_up.format == INT4_ZERO
