"""decode_step, a whole token as one op, against the same layers in plain PyTorch.

Counted bytes: all packed weights and the filled part of the caches, once. A model's own layers
follow each other, so that none is warm in the last-level cache unless the model fits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import harness
import shapes
import torch
import torch.nn.functional as F

import fasttps
from fasttps import ops
from fasttps.ops import PackedFormat

EPS = 1e-5
EXACT = (PackedFormat.F32, PackedFormat.BF16, PackedFormat.F16)


def dense_layer(model: shapes.ModelShape, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, o, gate, up, down of one layer."""
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    sizes = [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
    sizes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    return [(torch.randn(size) * size[1] ** -0.5).to(dtype) for size in sizes]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def case_of(
    model: shapes.ModelShape,
    layers: int,
    context: int,
    vocab_size: int,
    packed_format: PackedFormat,
    group_size: int = 0,
    batch: int = 1,
) -> harness.Case:
    dtype = torch.bfloat16
    dense = [dense_layer(model, dtype) for _ in range(layers)]
    head = torch.randn(vocab_size, model.hidden_size).to(dtype)
    options = {"format": packed_format}
    if group_size:
        options["group_size"] = group_size
    weights = []
    for q, k, v, o, gate, up, down in dense:
        weights += [ops.pack_weight(w, **options) for w in (q, k, v, o)]
        weights += [ops.pack_gate_up(gate, up, **options), ops.pack_weight(down, **options)]
    lm_head = ops.pack_weight(head, **options)
    norms = [torch.ones(model.hidden_size, dtype=dtype) for _ in range(2 * layers + 1)]
    slots = (batch, model.num_kv_heads, context + 1, model.head_dim)
    k_caches, v_caches = (
        [shapes.random_kv_cache(slots, dtype) for _ in range(layers)] for _ in range(2)
    )
    cos, sin = shapes.cos_sin(torch.tensor([context]), model.head_dim, dtype)
    x = torch.randn(batch, 1, model.hidden_size).to(dtype)
    seq_lens = torch.tensor(context)
    arguments: dict[str, Any] = {
        "formats": [packed_format] * len(weights),
        "group_sizes": [group_size] * len(weights),
        "num_heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
        "norm_eps": EPS,
        "lm_head": lm_head,
        "lm_head_format": packed_format,
        "lm_head_group_size": group_size,
        "vocab_size": vocab_size,
        "int8_activation": packed_format not in EXACT,
    }

    def step(**more: Any) -> torch.Tensor:
        return ops.decode_step(
            x, weights, norms, [], k_caches, v_caches, seq_lens, cos, sin, **arguments, **more
        )

    def in_torch() -> torch.Tensor:
        h = x
        for at, (q, k, v, o, gate, up, down) in enumerate(dense):
            n = norm(h, norms[2 * at])
            query, key, value = (
                F.linear(n, w).unflatten(-1, (-1, model.head_dim)).transpose(1, 2)
                for w in (q, k, v)
            )
            k_caches[at][:, :, context:] = shapes.rotate_halves(key, cos, sin)
            v_caches[at][:, :, context:] = value
            attended = F.scaled_dot_product_attention(
                shapes.rotate_halves(query, cos, sin), k_caches[at], v_caches[at], enable_gqa=True
            )
            h = h + F.linear(attended.transpose(1, 2).flatten(-2), o)
            n = norm(h, norms[2 * at + 1])
            h = h + F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)
        return F.linear(norm(h, norms[-1]), head)

    bound = ops.DecodeStep(weights, norms, [], k_caches, v_caches, **arguments)
    calls: dict[str, Callable[[], object]] = {
        harness.OURS: lambda: bound(x, seq_lens, cos, sin, argmax=True),
        "logits": lambda: bound(x, seq_lens, cos, sin),
        "unbound": lambda: step(argmax=True),
        "torch_bf16": in_torch,
    }
    cache_bytes = 2 * layers * batch * model.num_kv_heads * (context + 1) * model.head_dim * 2
    weight_bytes = sum(w.nbytes for w in weights) + lm_head.nbytes
    name = packed_format.name.lower() + (f" g{group_size}" if group_size else "")
    return harness.Case(
        f"{model.name} x{layers} {name} ctx {context}" + (f" batch {batch}" if batch > 1 else ""),
        dtype,
        calls,
        read_bytes=weight_bytes + cache_bytes,
        flops=2 * batch * sum(w.numel() for layer in dense for w in layer),
        notes={"format": name, "layers": layers, "batch": batch, "isa": fasttps.isa.active()},
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    if quick:
        yield case_of(shapes.SMOLLM2_135M, 2, 64, 1000, PackedFormat.BF16)
        return
    for context in (128, 2048, 8192):
        yield case_of(shapes.LLAMA_3_2_1B, 4, context, 32000, PackedFormat.BF16)
    for packed_format, group_size in ((PackedFormat.INT8, 0), (PackedFormat.INT4, 32)):
        yield case_of(shapes.LLAMA_3_2_1B, 4, 128, 32000, packed_format, group_size)
    for batch in (4, 16):
        yield case_of(shapes.LLAMA_3_2_1B, 4, 128, 32000, PackedFormat.BF16, batch=batch)
        yield case_of(shapes.LLAMA_3_2_1B, 4, 128, 32000, PackedFormat.INT8, batch=batch)
        yield case_of(shapes.LLAMA_3_2_1B, 4, 128, 32000, PackedFormat.INT4, 32, batch=batch)
    yield case_of(shapes.SMOLLM2_135M, 30, 128, 49152, PackedFormat.BF16)
    yield case_of(shapes.PHI_3_MINI, 4, 2048, 32064, PackedFormat.BF16)


if __name__ == "__main__":
    harness.main("decode_step", cases)
