"""causal_prefill against SDPA: a prompt into an empty cache, and a chunk after a filled one.

`sdpa` rotates, writes the rows and attends with enable_gqa: is_causal on an empty cache; on a
filled one, where is_causal would be upper-left aligned, with the mask that is right.
`layer_by_layer` is the chain of PyTorch's ops that STEEL (paper 002) fuses: repeated heads, scores,
mask, softmax in float32, values.
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
    visible = torch.ones(new_tokens, total, dtype=torch.bool).tril(context)
    groups = model.num_heads // model.num_kv_heads

    def written() -> torch.Tensor:
        """The rotated query, with the new rows in the caches."""
        k_cache.index_copy_(2, slots, shapes.rotate_halves(key.transpose(1, 2), cos, sin))
        v_cache.index_copy_(2, slots, value.transpose(1, 2))
        return shapes.rotate_halves(query.transpose(1, 2), cos, sin)

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            written(),
            k_cache,
            v_cache,
            attn_mask=visible if context else None,
            is_causal=context == 0,
            enable_gqa=True,
        )

    def layer_by_layer() -> torch.Tensor:
        q = written()
        keys = k_cache.repeat_interleave(groups, dim=1)
        scores = q @ keys.transpose(2, 3) * model.head_dim**-0.5
        scores = scores.masked_fill(~visible, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(dtype)
        return (weights @ v_cache.repeat_interleave(groups, dim=1)).transpose(1, 2).contiguous()

    calls: dict[str, Callable[[], object]] = {
        harness.OURS: lambda: fasttps.ops.causal_prefill(
            query, key, value, k_cache, v_cache, seq_lens, cos, sin
        ),
        "sdpa": sdpa,
        "layer_by_layer": layer_by_layer,
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
    for model in (shapes.LLAMA_3_2_1B, shapes.LLAMA_3_8B, shapes.LLAMA_2_7B):
        yield case_of(model, torch.bfloat16, 4096)
    yield case_of(shapes.LLAMA_3_2_1B, torch.float32, 512)
    yield case_of(shapes.LLAMA_3_2_1B, torch.float16, 512)


if __name__ == "__main__":
    harness.main("causal_prefill", cases)
