"""causal_prefill against SDPA: a prompt into an empty cache, and a chunk after a filled one.

`sdpa` rotates, writes the rows and attends with enable_gqa: is_causal on an empty cache; on a
filled one, where is_causal would be upper-left aligned, with the mask that is right.
Counted flops: the live part of the causal triangle alone, four an element of query times key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import shapes
import torch
import torch.nn.functional as F

import fasttps


def case_of(
    model: shapes.ModelShape, dtype: torch.dtype, new_tokens: int, context: int = 0
) -> harness.Case:
    total = context + new_tokens
    cos, sin = shapes.cos_sin(torch.arange(context, total), model.head_dim, dtype)
    query = torch.randn(1, new_tokens, model.num_heads, model.head_dim).to(dtype)
    key = torch.randn(1, new_tokens, model.num_kv_heads, model.head_dim).to(dtype)
    value = torch.randn_like(key)
    k_cache = torch.randn(1, model.num_kv_heads, total, model.head_dim).to(dtype)
    v_cache = torch.randn(1, model.num_kv_heads, total, model.head_dim).to(dtype)
    seq_lens, slots = torch.tensor(context), torch.arange(context, total)
    mask = torch.ones(new_tokens, total, dtype=torch.bool).tril(context) if context else None

    def sdpa() -> torch.Tensor:
        q = shapes.rotate_halves(query.transpose(1, 2), cos, sin)
        k_cache.index_copy_(2, slots, shapes.rotate_halves(key.transpose(1, 2), cos, sin))
        v_cache.index_copy_(2, slots, value.transpose(1, 2))
        return F.scaled_dot_product_attention(
            q, k_cache, v_cache, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )

    calls: dict[str, Callable[[], object]] = {
        harness.OURS: lambda: fasttps.ops.causal_prefill(
            query, key, value, k_cache, v_cache, seq_lens, cos, sin
        ),
        "sdpa": sdpa,
    }
    live = new_tokens * context + new_tokens * (new_tokens + 1) // 2
    return harness.Case(
        f"{model.name} new {new_tokens} ctx {context}",
        dtype,
        calls,
        flops=4 * model.num_heads * model.head_dim * live,
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    if quick:
        yield case_of(shapes.SMOLLM2_135M, torch.bfloat16, 256)
        return
    for model in shapes.ALL:
        for new_tokens, context in ((128, 0), (512, 0), (2048, 0), (512, 1536)):
            yield case_of(model, torch.bfloat16, new_tokens, context)
    yield case_of(shapes.LLAMA_3_2_1B, torch.float32, 512)
    yield case_of(shapes.LLAMA_3_2_1B, torch.float16, 512)


if __name__ == "__main__":
    harness.main("causal_prefill", cases)
