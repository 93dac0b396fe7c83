"""The write of new keys and values into a static cache."""

from __future__ import annotations

import torch
from torch import Tensor

_kv_cache_update_ = torch.ops.fasttps.kv_cache_update_.default


def kv_cache_update_(
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    *,
    ring: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write `key` and `value` into the caches at the slots from `seq_lens` on, in place.

    The address-jump write of FastTPS's global KV cache management (section 3.1.1, equation 2):
    a row of (sequence, head) goes to its place in memory allocated once; nothing is concatenated.

    Args:
        k_cache, v_cache: [batch, num_kv_heads, max_seq_len, head_dim], written. A dense last
            dimension, any other strides, no two elements at one address. The dtype of `key`, or
            int8 with `k_scale` and `v_scale`.
        key, value: [batch, new_tokens, num_kv_heads, head_dim], float32, bfloat16 or float16,
            any strides with a dense last dimension. Keys are already rotated.
        seq_lens: int64, [] or [batch]: tokens already in the cache, which is the slot of the
            first new row. Not changed.
        ring: slot = position mod max_seq_len, so that `seq_lens` may go up to 2^60; new_tokens
            is at most max_seq_len.
        k_scale, v_scale: float32 [batch, num_kv_heads, max_seq_len], written: the scale of each
            int8 row, max|row| / 127; q = round-half-even(x / scale); a row of zeros has scale 0.

    Raises:
        ValueError: a shape, stride or value is wrong, or seq_lens + new_tokens exceeds
            max_seq_len. Nothing was written.
        TypeError: a dtype or device is wrong. Nothing was written.
        RuntimeError: a gradient is asked for.
    """
    _kv_cache_update_(
        k_cache, v_cache, key, value, seq_lens, ring=ring, k_scale=k_scale, v_scale=v_scale
    )
