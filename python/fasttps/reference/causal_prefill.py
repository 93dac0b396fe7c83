"""`causal_prefill` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attention


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
    """The same as `rope_attention_decode`: the two ops differ in algorithm, not in meaning.

    float64 inputs are computed in float64; others in float32, with the rotated key rounded once
    to the cache's dtype and the output once to the query's; with return_lse both results stay in
    the compute dtype. Autocast changes nothing.
    """
    with torch.autocast(query.device.type, enabled=False):
        out, lse = attention(
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
    return (out, lse) if return_lse else out.to(query.dtype)
