"""RoPE, the cache write and attention for a whole prompt."""

from __future__ import annotations

import torch
from torch import Tensor

_out = torch.ops.fasttps.causal_prefill.default
_out_and_lse = torch.ops.fasttps.causal_prefill.lse


def causal_prefill(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    interleaved: bool = False,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    kv_start: Tensor | None = None,
    query_start: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    ring: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotate query and key, write key and value into the cache, attend to it in tiles.

    The arguments, results and errors are those of `rope_attention_decode`; this op is made for
    many new tokens. After STEEL (algorithm 1, section IV-A): an online softmax in base 2 over
    tiles of queries and keys, where tiles that the limits hide whole are skipped and the limits
    of the others are applied in the core; rows are placed so that every worker gets the same
    number of live tiles (section IV-C). The causal diagonal is the bottom-right one: token i
    stands at position `seq_lens` + i, so a cache that already holds tokens is attended too.

    Args:
        query: [batch, new_tokens, num_heads, head_dim], float32, bfloat16 or float16.
        key, value: [batch, new_tokens, num_kv_heads, head_dim] of the query's dtype, or None.
        k_cache, v_cache: [batch, num_kv_heads, max_seq_len, head_dim], written unless `key` is
            None.
        seq_lens: int64, [] or [batch]: tokens already in the cache; 0 for a new prompt.
        cos, sin: [1 or batch, new_tokens, rotary_dim], or None: already rotated.
        interleaved, scale, attn_mask, kv_start, query_start, window, softcap, sinks, ring,
            k_scale, v_scale, return_lse: see `rope_attention_decode`.

    Returns:
        out [batch, new_tokens, num_heads, head_dim], contiguous, in the query's dtype; with
        return_lse, float32 out and float32 lse [batch, num_heads, new_tokens].

    Raises:
        ValueError: a shape, stride or value is wrong, or the cache would overflow. Nothing was
            written.
        TypeError: a dtype or device is wrong. Nothing was written.
        RuntimeError: a gradient is asked for.
    """
    op = _out_and_lse if return_lse else _out
    return op(
        query,
        key,
        value,
        k_cache,
        v_cache,
        seq_lens,
        cos,
        sin,
        interleaved=interleaved,
        scale=scale,
        attn_mask=attn_mask,
        kv_start=kv_start,
        query_start=query_start,
        window=window,
        softcap=softcap,
        sinks=sinks,
        ring=ring,
        k_scale=k_scale,
        v_scale=v_scale,
    )
