"""Random calls of the ops that multiply with packed weights or look rows up, valid and wrong."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fasttps import ops
from tests.ops.test_gate_up_silu_mlp import check_mlp, check_quantized, mlp_arguments, weights_of
from tests.ops.test_packed_embedding import embedding_arguments
from tests.ops.test_packed_linear import check_linear, linear_arguments, weight_of
from tests.ops.test_packed_linear import check_quantized as check_quantized_linear
from tests.support.attention import randn
from tests.support.fuzz import (
    assert_close_to_twin,
    check_spoiled_calls,
    devices,
    dtypes,
    kernels,
    many,
    seeds,
    several_strides,
    some,
)
from tests.support.quantized import QUANTIZED, packed_weight

sizes = st.integers(1, 70)
tokens = st.integers(1, 23)
cases = st.sampled_from(QUANTIZED)
activations = st.sampled_from(["silu", "gelu", "gelu_tanh"])
K_QUANTS = (ops.PackedFormat.Q4_K, ops.PackedFormat.Q6_K)


def biases_of(draw, dtype, *rows):
    """For each size a bias of x's dtype, of float32, every other element of one, or None."""
    found = []
    for at, size in enumerate(rows):
        kind = draw(st.sampled_from(["none", "same", "float32", "stride 2"]))
        bias = randn(20 + at, 2 * size, dtype=torch.float32 if kind == "float32" else dtype)
        found.append(None if kind == "none" else bias[::2] if kind == "stride 2" else bias[:size])
    return found


@st.composite
def rows_of_x(draw, cols, dtype):
    """x [..., cols] of one to three dimensions and some strides.

    At least 64 numbers: of a handful, PyTorch may have rounded every one well by luck.
    """
    count = max(draw(tokens), -(-64 // cols))
    x = randn(draw(seeds), count, cols, dtype=dtype)
    shape = draw(st.sampled_from(["matrix", "batch", "padded"]))
    if shape == "batch":
        x = several_strides(draw, x.view(1, count, cols).expand(2, count, cols), (0, 1))
    elif shape == "padded":
        x = several_strides(draw, x, (0,))
    return x


def test_valid_mlp():
    @many
    @given(devices, dtypes, sizes, sizes, st.data())
    def check(device, dtype, hidden_size, intermediate_size, data):
        weights, _ = weights_of(hidden_size, intermediate_size, dtype, data.draw(seeds))
        biases = biases_of(data.draw, dtype, intermediate_size, intermediate_size, hidden_size)
        x = data.draw(rows_of_x(hidden_size, dtype))
        with device.active():
            check_mlp(device, x, weights, biases, data.draw(activations))

    check()


def test_valid_mlp_of_quantized_weights():
    @many
    @given(devices, dtypes, st.data())
    def check(device, dtype, data):
        gate_up, down = (data.draw(st.one_of(st.none(), cases)) for _ in range(2))
        if gate_up is None and down is None:
            down = QUANTIZED[0]
        hidden_size, intermediate_size = data.draw(sizes), data.draw(sizes)
        if gate_up is not None and gate_up[0] in K_QUANTS:
            hidden_size = 256
        if down is not None and down[0] in K_QUANTS:
            intermediate_size = 256
        count = max(data.draw(tokens), -(-64 // hidden_size))
        shape = (count, hidden_size, intermediate_size)
        with device.active():
            check_quantized(device, dtype, gate_up, down, data.draw(st.booleans()), *shape)

    check()


def test_valid_linear():
    @many
    @given(devices, dtypes, sizes, sizes, st.data())
    def check(device, dtype, rows, cols, data):
        x = data.draw(rows_of_x(cols, dtype))
        case = data.draw(st.one_of(st.none(), cases))
        (bias,) = biases_of(data.draw, dtype, rows)
        if case is None:
            with device.active():
                check_linear(device, x, weight_of(rows, cols, dtype), bias)
            return
        named, weight = packed_weight(case, rows, cols, data.draw(seeds))
        if weight.size(1) != cols:
            x = data.draw(rows_of_x(weight.size(1), dtype))
        with device.active():
            check_quantized_linear(device, x, named, weight, data.draw(st.booleans()), bias)

    check()


@st.composite
def embedding_calls(draw):
    """(keyword arguments, the rows that the ids name)."""
    rows, cols, dtype = draw(sizes), draw(sizes), draw(dtypes)
    shape = draw(st.sampled_from([(), (0,), (5,), (2, 3), (1, 2, 2), (2, 0)]))
    generator = torch.Generator().manual_seed(draw(seeds))
    of_ids = draw(st.sampled_from([torch.int64, torch.int32]))
    ids = torch.randint(rows, shape, generator=generator, dtype=of_ids)
    if ids.dim() == 2 and draw(st.booleans()):
        ids = ids.t()
    case = draw(st.one_of(st.none(), cases))
    if case is None:
        weight = randn(draw(seeds), rows, cols, dtype=draw(dtypes))
        return embedding_arguments(ids, weight, dtype), weight[ids.long()].to(dtype)
    named, weight = packed_weight(case, rows, cols)
    call = {"ids": ids, **named, "cols": weight.size(1), "dtype": dtype}
    return call, weight[ids.long()].to(dtype)


def test_valid_embedding():
    @many
    @given(devices, embedding_calls())
    def check(device, call):
        arguments, expected = call
        with device.active():
            out = device.call("packed_embedding", **device.arguments(arguments))
        assert out.is_contiguous() and out.dtype == expected.dtype
        assert torch.equal(out, expected)

    check()


@st.composite
def mlp_calls(draw):
    dtype, hidden_size, intermediate_size = draw(dtypes), draw(sizes), draw(sizes)
    weights, _ = weights_of(hidden_size, intermediate_size, dtype)
    biases = biases_of(draw, dtype, intermediate_size, intermediate_size, hidden_size)
    x = randn(1, draw(tokens), hidden_size, dtype=dtype)
    call = mlp_arguments(x, weights, biases, draw(activations))
    return call | {"gate_up_group_size": 0, "down_group_size": 0, "int8_activation": False}


def test_spoiled_mlp():
    check_spoiled_calls(
        mlp_calls().map(lambda call: ("gate_up_silu_mlp", call)), assert_close_to_twin
    )


@st.composite
def linear_calls(draw):
    dtype, rows, cols = draw(dtypes), draw(sizes), draw(sizes)
    (bias,) = biases_of(draw, dtype, rows)
    case = draw(st.one_of(st.none(), cases))
    if case is None:
        x = randn(1, draw(tokens), cols, dtype=dtype)
        call = linear_arguments(x, weight_of(rows, cols, dtype), bias)
        return call | {"group_size": 0, "int8_activation": False}
    named, weight = packed_weight(case, rows, cols)
    x = randn(1, draw(tokens), weight.size(1), dtype=dtype)
    return {"x": x, **named, "bias": bias, "int8_activation": draw(st.booleans())}


def test_spoiled_linear():
    check_spoiled_calls(
        linear_calls().map(lambda call: ("packed_linear", call)), assert_close_to_twin
    )


def test_spoiled_embedding():
    calls = embedding_calls().map(lambda call: ("packed_embedding", call[0]))
    check_spoiled_calls(calls, assert_close_to_twin, kept=("dtype",))


def test_no_tokens():
    @some
    @given(kernels, st.one_of(mlp_calls(), linear_calls()), st.data())
    def check(device, call, data):
        op = "gate_up_silu_mlp" if "gate_up" in call else "packed_linear"
        call = call | {"x": call["x"][:0] if data.draw(st.booleans()) else call["x"][None, :0]}
        with device.active():
            out = device.call(op, **device.arguments(call))
        assert out.shape == (*call["x"].shape[:-1], call.get("rows", call["x"].size(-1)))

    check()
