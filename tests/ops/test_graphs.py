"""Schemas, Meta kernels and torch.compile: what a graph sees is what an op does."""

from __future__ import annotations

import pytest
import torch

from fasttps import ops
from tests.ops.test_gate_up_silu_mlp import mlp_arguments, weights_of
from tests.support.attention import attention_inputs, randn
from tests.support.decoder import Decoder
from tests.support.errors import bits
from tests.support.quantized import gguf_blocks, zero_quants

ATTENTION = {
    "plain": {},
    "transposed": {"transposed": True, "new_tokens": 7, "dtype": torch.bfloat16},
    "rope": {"rotary_dim": 32, "interleaved": True, "past": [3, 9]},
    "attend_only": {"attend_only": True},
    "int8": {"int8": True, "new_tokens": 3},
    "ring": {"ring": True, "window": 5, "past": 40},
    "options": {
        "new_tokens": 2,
        "scale": 0.3,
        "kv_start": torch.tensor([1, 2]),
        "query_start": torch.tensor(7),
        "window": 6,
        "softcap": 3.0,
        "sinks": torch.zeros(4),
        "attn_mask": torch.ones(24, 2, 1, 2, dtype=torch.bool).permute(3, 2, 1, 0),
    },
}


def attention_call(name):
    return attention_inputs(unused=0.0, **ATTENTION[name])


def update_call(**options):
    inputs = attention_inputs(unused=0.0, new_tokens=2, **options)
    inputs.pop("query")
    return inputs


def mlp_call(**options):
    weights, biases = weights_of(20, 18, torch.bfloat16, biased=True)
    x = randn(5, 3, 4, 31, dtype=torch.bfloat16)[..., :20].transpose(0, 1)
    return mlp_arguments(x, weights, biases, **options)


def merge_call():
    outs = [randn(i, 2, 4, 3, 8).transpose(1, 2) for i in range(3)]
    return {"outs": outs, "lses": [randn(9 + i, 2, 3, 4).transpose(1, 2) for i in range(3)]}


def gguf_call():
    return {
        "blocks": gguf_blocks(ops.PackedFormat.Q6_K, 17, 256),
        "format": 8,
        "rows": 17,
        "cols": 256,
    }


def quants_call():
    quants, scales, zeros = zero_quants(randn(0, 17, 100), 32)
    return {
        "quants": quants.t().contiguous().t(),
        "scales": scales,
        "zeros": zeros,
        "format": ops.PackedFormat.INT4_ZERO,
        "group_size": 32,
    }


def gguf_out_call():
    """The panels of one of two weights, in turn."""
    packed = ops.pack_gguf(**gguf_call())
    return {**gguf_call(), "out": packed.new_zeros(2, 2, packed.numel() // 2)[:, 1]}


def quantized_mlp_call():
    gate_up_format, gate_up_group = ops.PackedFormat.INT4, 32
    gate, up, down = randn(0, 18, 20), randn(1, 18, 20), randn(2, 20, 18)
    return {
        "x": randn(5, 3, 20, dtype=torch.bfloat16),
        "gate_up": ops.pack_gate_up(gate, up, format=gate_up_format, group_size=gate_up_group),
        "down": ops.pack_weight(down, format=3),
        "gate_up_format": gate_up_format,
        "down_format": 3,
        "gate_up_group_size": gate_up_group,
        "intermediate_size": 18,
        "int8_activation": True,
    }


def packed_call(op):
    gate, up = (randn(i, 19, 9, dtype=torch.bfloat16)[:, :7] for i in range(2))
    if op == "pack_weight":
        return {"weight": gate, "format": 1}
    if op == "pack_gate_up":
        return {"gate": gate, "up": up, "format": 1}
    packed = (
        ops.pack_weight(gate, format=1)
        if op == "unpack_weight"
        else ops.pack_gate_up(gate, up, format=1)
    )
    return {"packed": packed, "format": 1, "rows": 19, "cols": 7}


def linear_call():
    packed = ops.pack_weight(randn(0, 19, 20, dtype=torch.bfloat16), format=1)
    x = randn(5, 3, 4, 31, dtype=torch.bfloat16)[..., :20].transpose(0, 1)
    return {"x": x, "packed": packed, "format": 1, "rows": 19, "bias": randn(6, 19)}


def embedding_call():
    packed = ops.pack_weight(randn(0, 19, 20, dtype=torch.bfloat16), format=1)
    ids = torch.tensor([[3, 18, 0], [1, 2, 3]]).t()
    return {
        "ids": ids,
        "packed": packed,
        "format": 1,
        "rows": 19,
        "cols": 20,
        "dtype": torch.float32,
    }


def step_call(int8_cache=False):
    decoder = Decoder(biased=True, int8_cache=int8_cache)
    arguments = decoder.arguments(torch.tensor([[3], [7]]), [4, 9], ends=True)
    return arguments | {"kv_start": torch.tensor([1, 0])}


def step_call_with_more_norms():
    arguments = step_call()
    return arguments | {
        "head_norms": [torch.ones(16)] * 4,
        "out_norms": [torch.ones(40), None] * 2,
        "windows": [3, 0],
        "ropes": [0, -1],
        "orders": [torch.arange(39, -1, -1)],
        "columns": [0] * 3 + [-1] * 9,
        "softcap": 2.0,
    }


# name -> (op, overload, keyword arguments)
CALLS = {
    **{
        f"{op}.{overload}-{name}": (op, overload, lambda name=name: attention_call(name))
        for op in ("rope_attention_decode", "causal_prefill")
        for overload in ("default", "lse")
        for name in ATTENTION
    },
    "kv_cache_update_": ("kv_cache_update_", "default", update_call),
    "kv_cache_update_-transposed": (
        "kv_cache_update_",
        "default",
        lambda: update_call(transposed=True, dtype=torch.bfloat16),
    ),
    "kv_cache_update_-int8": ("kv_cache_update_", "default", lambda: update_call(int8=True)),
    "merge_attention": ("merge_attention", "default", merge_call),
    "gate_up_silu_mlp": ("gate_up_silu_mlp", "default", mlp_call),
    "gate_up_silu_mlp-gelu": ("gate_up_silu_mlp", "default", lambda: mlp_call(activation="gelu")),
    "gate_up_silu_mlp-quantized": ("gate_up_silu_mlp", "default", quantized_mlp_call),
    "pack_gguf": ("pack_gguf", "default", gguf_call),
    "pack_quants": ("pack_quants", "default", quants_call),
    "pack_gguf.out": ("pack_gguf", "out", gguf_out_call),
    "packed_linear": ("packed_linear", "default", linear_call),
    "packed_embedding": ("packed_embedding", "default", embedding_call),
    "decode_step": ("decode_step", "default", step_call),
    "decode_step.argmax": ("decode_step", "argmax", step_call),
    "decode_step-norms": ("decode_step", "default", step_call_with_more_norms),
    "decode_step-int8": ("decode_step", "default", lambda: step_call(int8_cache=True)),
    **{
        op: (op, "default", lambda op=op: packed_call(op))
        for op in ("pack_weight", "unpack_weight", "pack_gate_up", "unpack_gate_up")
    },
}


def overload_of(name):
    op, overload, make = CALLS[name]
    return getattr(getattr(torch.ops.fasttps, op), overload), make()


def split(op, arguments):
    """Positional and keyword arguments, as the schema has them."""
    positional, keywords = [], {}
    for argument in op._schema.arguments:
        if argument.kwarg_only:
            if argument.name in arguments:
                keywords[argument.name] = arguments[argument.name]
        else:
            positional.append(arguments.get(argument.name))
    return tuple(positional), keywords


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(device_family, name):
    """Schema, autograd registration, Meta kernel (shapes, strides) and dynamic AOT dispatch."""
    op, arguments = overload_of(name)
    positional, keywords = split(op, device_family.arguments(arguments))
    results = torch.library.opcheck(op, positional, keywords)
    assert set(results.values()) == {"SUCCESS"}


def test_every_overload_is_checked():
    listed = {(op, overload) for op, overload, _ in CALLS.values()}
    for op in ops.__all__:
        packet = getattr(torch.ops.fasttps, op, None)
        if packet is not None:
            assert {(op, overload) for overload in packet.overloads()} <= listed


@pytest.mark.parametrize("name", CALLS)
def test_meta_results_are_those_of_the_device(device_family, name):
    """The same shapes, strides and dtypes, from shapes alone."""
    op, arguments = overload_of(name)
    positional, keywords = split(op, device_family.arguments(arguments))
    real = op(*positional, **keywords)

    def to_meta(value):
        if isinstance(value, list):
            return [to_meta(item) for item in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    positional, keywords = split(op, {key: to_meta(value) for key, value in arguments.items()})
    meta = op(*positional, **keywords)
    for one, other in zip(_tensors(real), _tensors(meta)):
        assert other.is_meta
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _tensors(result):
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(result)


def all_bits(values):
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [bits(tensor) for tensor in tensors if tensor.numel()]


COMPILED = [
    "rope_attention_decode.default-transposed",
    "rope_attention_decode.lse-rope",
    "rope_attention_decode.default-int8",
    "causal_prefill.default-options",
    "causal_prefill.lse-transposed",
    "kv_cache_update_-transposed",
    "merge_attention",
    "gate_up_silu_mlp",
    "packed_linear",
    "packed_embedding",
    "decode_step",
    "pack_gate_up",
    "unpack_weight",
]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager(device_family, name):
    """fullgraph, through the functions of fasttps.ops: outputs and caches, bit for bit.

    Views as query, a number of tokens that no block divides and a batch above one: a Meta kernel
    that copied the strides of its inputs gave wrong numbers here.
    """
    op, overload, make = CALLS[name]
    function = getattr(ops, op)
    options = {"return_lse": True} if overload == "lse" else {}
    eager, compiled = (device_family.arguments(make()) for _ in range(2))
    expected = function(**eager, **options)

    def doubled(arguments):
        result = function(**arguments, **options)
        return [2 * t if t.is_floating_point() else t for t in _tensors(result)]

    torch._dynamo.reset()
    out = torch.compile(doubled, backend="aot_eager", fullgraph=True)(compiled)
    for one, other in zip(out, _tensors(expected)):
        assert one.stride() == other.stride()
        assert torch.equal(one, 2 * other if other.is_floating_point() else other)
    for one, other in zip(all_bits(eager.values()), all_bits(compiled.values())):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_moving_position_recompiles_nothing(device_family, dynamic):
    """seq_lens is a tensor: a loop of decode steps is one graph."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True, dynamic=dynamic)
    def step(arguments):
        return ops.rope_attention_decode(**arguments) + 1

    arguments = device_family.arguments(attention_inputs(past=[3, 9], rotary_dim=64))
    # Never a view: with dynamic sizes torch itself guards the base of one, and a sum has none.
    arguments["seq_lens"] = arguments["seq_lens"].clone()
    eager = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in arguments.items()}
    for _ in range(5):
        expected = ops.rope_attention_decode(**eager) + 1
        assert torch.equal(step(arguments), expected)
        for state in (arguments, eager):
            state["seq_lens"] = state["seq_lens"] + 1
    assert len(graphs) == 1


CHANGING = [
    "causal_prefill",
    "gate_up_silu_mlp",
    "merge_attention",
    "packed_embedding",
    "packed_linear",
]


@pytest.mark.parametrize("op", CHANGING)
def test_changing_length_is_one_dynamic_graph(device_family, op):
    """Meta kernels that read the sizes made a graph for each prompt length."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    make = {
        "causal_prefill": lambda tokens: attention_inputs(
            past=0, new_tokens=tokens, max_seq_len=16, rotary_dim=64
        ),
        "gate_up_silu_mlp": lambda tokens: (
            mlp_call() | {"x": randn(5, 2, tokens, 20, dtype=torch.bfloat16)}
        ),
        "packed_embedding": lambda tokens: (
            embedding_call() | {"ids": torch.arange(2 * tokens).view(2, tokens)}
        ),
        "packed_linear": lambda tokens: (
            linear_call() | {"x": randn(5, 2, tokens, 20, dtype=torch.bfloat16)}
        ),
        "merge_attention": lambda tokens: {
            "outs": [randn(seed, 2, tokens, 4, 8) for seed in (1, 2)],
            "lses": [randn(seed, 2, 4, tokens) for seed in (3, 4)],
        },
    }[op]
    function = getattr(ops, op)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (3, 5, 7, 9):
        eager, traced = (device_family.arguments(make(tokens)) for _ in range(2))
        for one, other in zip(_tensors(function(**eager)), _tensors(compiled(**traced))):
            assert torch.equal(one, other)
    assert len(graphs) == 1


def test_wrong_call_in_a_graph_is_the_same_error(device_family):
    """The Meta kernel checks with the op's own check, so tracing reports it."""
    arguments = device_family.arguments(attention_inputs())
    arguments["value"] = arguments["value"][..., :5]
    torch._dynamo.reset()
    compiled = torch.compile(ops.causal_prefill, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"causal_prefill: value must be"):
        compiled(**arguments)


def test_length_is_checked_when_a_graph_runs(device_family):
    arguments = device_family.arguments(attention_inputs())
    torch._dynamo.reset()
    compiled = torch.compile(ops.rope_attention_decode, backend="aot_eager", fullgraph=True)
    compiled(**arguments)
    before = arguments["k_cache"].clone()
    with pytest.raises(ValueError, match="rope_attention_decode: seq_lens"):
        compiled(**(arguments | {"seq_lens": torch.tensor(24)}))
    assert torch.equal(bits(arguments["k_cache"]), bits(before))
