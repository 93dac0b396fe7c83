"""rope_attention_decode against SDPA and eager: one new token, RoPE and the cache write included.

`sdpa_static` rotates, writes its row with index_copy_ and attends over the filled part of the
cache with enable_gqa; `sdpa_cat` concatenates the cache first, as a dynamic cache does;
`eager_cat` is what transformers' eager attention does with such a cache: it also repeats grouped
heads and takes the softmax in float32. With int8 caches these keep theirs in bfloat16.
Counted bytes: keys and values of the context, once a KV head, and the scales of int8 rows. Several
caches are used in turn so that, as in a model of many layers, none is warm in the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import shapes
import torch
import torch.nn.functional as F

import fasttps
from fasttps.memory import empty_in_huge_pages


def rows_and_scales(
    rows: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cache rows in `dtype`, where a StaticKVCache has them; int8 rows with a factor a row."""
    kept = empty_in_huge_pages(rows.shape, dtype)
    if dtype != torch.int8:
        return kept.copy_(rows), None
    scales = rows.float().abs().amax(-1) / 127
    return kept.copy_((rows / scales[..., None]).round()), scales


def layer_calls(
    model: shapes.ModelShape, dtype: torch.dtype, context: int
) -> dict[str, Callable[[], object]]:
    """The calls of one layer: its own caches, holding `context` tokens with the new one."""
    old = context - 1
    groups = model.num_heads // model.num_kv_heads
    float_dtype = torch.bfloat16 if dtype == torch.int8 else dtype
    cos, sin = shapes.cos_sin(torch.tensor([old]), model.head_dim, float_dtype)
    query = torch.randn(1, 1, model.num_heads, model.head_dim).to(float_dtype)
    key = torch.randn(1, 1, model.num_kv_heads, model.head_dim).to(float_dtype)
    value = torch.randn_like(key)
    shape = (1, model.num_kv_heads, context, model.head_dim)
    k_cache, v_cache = torch.randn(shape).to(float_dtype), torch.randn(shape).to(float_dtype)
    our_k, k_scale = rows_and_scales(k_cache, dtype)
    our_v, v_scale = rows_and_scales(v_cache, dtype)
    seq_lens, slot = torch.tensor(old), torch.tensor([old])

    def rotated() -> tuple[torch.Tensor, torch.Tensor]:
        return (
            shapes.rotate_halves(query.transpose(1, 2), cos, sin),
            shapes.rotate_halves(key.transpose(1, 2), cos, sin),
        )

    def concatenated(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.cat((k_cache[:, :, :old], k), dim=2),
            torch.cat((v_cache[:, :, :old], value.transpose(1, 2)), dim=2),
        )

    def sdpa_static() -> torch.Tensor:
        q, k = rotated()
        k_cache.index_copy_(2, slot, k)
        v_cache.index_copy_(2, slot, value.transpose(1, 2))
        return F.scaled_dot_product_attention(q, k_cache, v_cache, enable_gqa=True)

    def sdpa_cat() -> torch.Tensor:
        q, k = rotated()
        keys, values = concatenated(k)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    def eager_cat() -> torch.Tensor:
        q, k = rotated()
        keys, values = (
            rows[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
            for rows in concatenated(k)
        )
        scores = q @ keys.transpose(2, 3) * model.head_dim**-0.5
        weights = scores.softmax(-1, dtype=torch.float32).to(float_dtype)
        return (weights @ values).transpose(1, 2).contiguous()

    return {
        harness.OURS: lambda: fasttps.ops.rope_attention_decode(
            query,
            key,
            value,
            our_k,
            our_v,
            seq_lens,
            cos,
            sin,
            k_scale=k_scale,
            v_scale=v_scale,
        ),
        "sdpa_static": sdpa_static,
        "sdpa_cat": sdpa_cat,
        "eager_cat": eager_cat,
    }


def case_of(model: shapes.ModelShape, dtype: torch.dtype, context: int) -> harness.Case:
    row_bytes = model.head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0)
    cache_bytes = 2 * model.num_kv_heads * context * row_bytes
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
        notes={"caches_in_turn": len(layers)},
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    if quick:
        yield case_of(shapes.SMOLLM2_135M, torch.bfloat16, 1024)
        return
    for model in (*shapes.ALL, shapes.LLAMA_2_7B, shapes.LLAMA_3_8B):
        for context in (128, 1024, 4096, 8192):
            yield case_of(model, torch.bfloat16, context)
    for model in (shapes.LLAMA_3_2_1B, shapes.PHI_3_MINI, shapes.LLAMA_3_8B):
        yield case_of(model, torch.int8, 8192)
    yield case_of(shapes.LLAMA_3_2_1B, torch.float32, 4096)
    yield case_of(shapes.LLAMA_3_2_1B, torch.float16, 4096)


if __name__ == "__main__":
    harness.main("rope_attention_decode", cases)
