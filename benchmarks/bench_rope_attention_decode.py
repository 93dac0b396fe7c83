"""rope_attention_decode against SDPA: one new token, RoPE and the cache write included.

`sdpa_static` rotates, writes its row with index_copy_ and attends over the filled part of the
cache with enable_gqa; `sdpa_cat` concatenates the cache first, as a dynamic cache does.
Counted bytes: keys and values of the context, once a KV head. Several caches are used in turn so
that, as in a model of many layers, none is warm in the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import shapes
import torch
import torch.nn.functional as F

import fasttps


def layer_calls(
    model: shapes.ModelShape, dtype: torch.dtype, context: int
) -> dict[str, Callable[[], object]]:
    """The calls of one layer: its own caches, holding `context` tokens with the new one."""
    old = context - 1
    cos, sin = shapes.cos_sin(torch.tensor([old]), model.head_dim, dtype)
    query = torch.randn(1, 1, model.num_heads, model.head_dim).to(dtype)
    key = torch.randn(1, 1, model.num_kv_heads, model.head_dim).to(dtype)
    value = torch.randn_like(key)
    k_cache = torch.randn(1, model.num_kv_heads, context, model.head_dim).to(dtype)
    v_cache = torch.randn(1, model.num_kv_heads, context, model.head_dim).to(dtype)
    seq_lens, slot = torch.tensor(old), torch.tensor([old])

    def rotated() -> tuple[torch.Tensor, torch.Tensor]:
        return (
            shapes.rotate_halves(query.transpose(1, 2), cos, sin),
            shapes.rotate_halves(key.transpose(1, 2), cos, sin),
        )

    def sdpa_static() -> torch.Tensor:
        q, k = rotated()
        k_cache.index_copy_(2, slot, k)
        v_cache.index_copy_(2, slot, value.transpose(1, 2))
        return F.scaled_dot_product_attention(q, k_cache, v_cache, enable_gqa=True)

    def sdpa_cat() -> torch.Tensor:
        q, k = rotated()
        keys = torch.cat((k_cache[:, :, :old], k), dim=2)
        values = torch.cat((v_cache[:, :, :old], value.transpose(1, 2)), dim=2)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    return {
        harness.OURS: lambda: fasttps.ops.rope_attention_decode(
            query, key, value, k_cache, v_cache, seq_lens, cos, sin
        ),
        "sdpa_static": sdpa_static,
        "sdpa_cat": sdpa_cat,
    }


def case_of(model: shapes.ModelShape, dtype: torch.dtype, context: int) -> harness.Case:
    cache_bytes = 2 * model.num_kv_heads * context * model.head_dim * dtype.itemsize
    layers = [
        layer_calls(model, dtype, context)
        for _ in range(harness.copies_beyond_cache(cache_bytes, limit_bytes=512 << 20))
    ]
    return harness.Case(
        f"{model.name} ctx {context}",
        dtype,
        {name: harness.rotate([layer[name] for layer in layers]) for name in layers[0]},
        read_bytes=cache_bytes,
        footprint_bytes=cache_bytes * len(layers),
        flops=4 * model.num_heads * context * model.head_dim,
        notes={"caches_in_turn": len(layers)},
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    if quick:
        yield case_of(shapes.SMOLLM2_135M, torch.bfloat16, 1024)
        return
    for model in shapes.ALL:
        for context in (128, 1024, 4096):
            yield case_of(model, torch.bfloat16, context)
    yield case_of(shapes.LLAMA_3_2_1B, torch.float32, 4096)
    yield case_of(shapes.LLAMA_3_2_1B, torch.float16, 4096)


if __name__ == "__main__":
    harness.main("rope_attention_decode", cases)
