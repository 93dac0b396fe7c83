"""`rope_attention_decode` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from .attention import apply_rope, attend, compute_dtype, read_rows, visible_slots, write_rows


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
    """RoPE, the cache write and attention over the cache.

    float64 inputs are computed in float64; others in float32, with the rotated key rounded once
    to the cache's dtype and the output once to the query's; with return_lse both results stay in
    the compute dtype. Autocast changes nothing.
    """
    dtype = compute_dtype(query.dtype)
    batch, new_tokens, num_heads, head_dim = query.shape
    if query.numel() == 0:
        out, lse = query.new_empty(query.shape), query.new_empty(batch, num_heads, new_tokens)
        return (out.to(dtype), lse.to(dtype)) if return_lse else out

    kv_len = seq_lens = seq_lens.expand(batch)
    query_start = seq_lens if query_start is None else query_start.expand(batch)
    if key is not None and value is not None:
        rotated_key = key if cos is None else apply_rope(key.to(dtype), cos, sin, interleaved)
        write_rows(k_cache, k_scale, rotated_key, seq_lens, ring)
        write_rows(v_cache, v_scale, value, seq_lens, ring)
        kv_len = seq_lens + new_tokens

    slots = k_cache.size(2) if ring else int(kv_len.max())
    visible = visible_slots(
        kv_len, query_start, new_tokens, slots, ring=ring, window=window, kv_start=kv_start
    )
    if attn_mask is not None:
        visible = visible & attn_mask[..., :slots]
    out, lse = attend(
        apply_rope(query.to(dtype), cos, sin, interleaved),
        read_rows(k_cache, k_scale, slots, dtype),
        read_rows(v_cache, v_scale, slots, dtype),
        visible,
        scale=head_dim**-0.5 if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
    )
    return (out, lse) if return_lse else out.to(query.dtype)
