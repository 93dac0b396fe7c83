"""RoPE, the cache write and attention for a few new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

_out = torch.ops.fasttps.rope_attention_decode.default
_out_and_lse = torch.ops.fasttps.rope_attention_decode.lse


def rope_attention_decode(
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
    """Rotate query and key, write key and value into the cache, attend to it: one pass.

    FastTPS's TPSFLAT (section 3.1.2, algorithm 3, appendix A): RoPE on query and key jointly, the
    cache write of section 3.1.1, QK^T, softmax and PV without a trip to memory between them. A
    long cache is split over threads and merged by (m, l, O), as in `merge_attention`. Correct for
    any number of new tokens; made for few.

    query token i (from 0) may attend position j where all of these hold:

        j < seq_lens + new_tokens           (j < seq_lens where key is None)
        j <= query_start + i
        j > query_start + i - window        window given; the current token counts
        j >= kv_start[b]                    kv_start given
        attn_mask[b, head, i, j]            attn_mask given

    NaN or inf in a row that may be attended propagates; other rows add nothing, whatever they
    hold. A row that may attend nothing gives zeros.

    Args:
        query: [batch, new_tokens, num_heads, head_dim], float32, bfloat16 or float16.
        key, value: [batch, new_tokens, num_kv_heads, head_dim] of the query's dtype, both or
            neither; num_heads is a multiple of num_kv_heads. None: attend only.
        k_cache, v_cache: [batch, num_kv_heads, max_seq_len, head_dim], written unless `key` is
            None. The query's dtype, or int8 with `k_scale` and `v_scale`. No two elements at one
            address where written. Allocated once: nothing is concatenated.
            query, key, value and the caches take any strides with a dense last dimension.
        seq_lens: int64, [] or [batch]: tokens already in the cache, which is the slot of the
            first new row. Not changed.
        cos, sin: [1 or batch, new_tokens, rotary_dim], float32 or the query's dtype, both or
            neither; rotary_dim even, at most head_dim, the other elements are left alone. None:
            query and key are already rotated. Applied in float32: x * cos + rotate(x) * sin; the
            key is rounded once, to the cache's dtype. rotate(x) is (-x2, x1) of the two halves,
            interleaved (-x[2i + 1], x[2i]): so each angle stands at both elements of its pair, as
            HuggingFace makes them, `cat((angles, angles), -1)` for halves. A table of half that
            width rotates half of head_dim.
        interleaved: rotate pairs (2i, 2i + 1) in place of (i, i + rotary_dim / 2).
        scale: of the scores; head_dim ** -0.5 if None.
        attn_mask: bool [batch or 1, num_heads or 1, new_tokens, T], True = attend, any strides;
            T at least the positions in the cache, with `ring` exactly max_seq_len (a cache slot).
        kv_start: int64 [batch]: the first position that may be attended (left padding).
        query_start: int64, [] or [batch], `seq_lens` if None: the position of query token 0.
        window: positions that a token may attend, itself included; at least 1.
        softcap: scores become softcap * tanh(score / softcap); above 0.
        sinks: [num_heads], floating: a logit in the softmax's denominator, without a value.
        ring: slot = position mod max_seq_len; wants a window, and
            window + new_tokens - 1 <= max_seq_len.
        k_scale, v_scale: float32 [batch, num_kv_heads, max_seq_len]: as in `kv_cache_update_`.
        return_lse: return float32 (out, lse) for `merge_attention`.

    Returns:
        out [batch, new_tokens, num_heads, head_dim], contiguous, in the query's dtype; with
        return_lse, float32 out and float32 lse [batch, num_heads, new_tokens]: the log (base e)
        of the softmax's denominator, sink included. A row that may attend nothing: (0, -inf),
        with a sink (0, sink).

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
