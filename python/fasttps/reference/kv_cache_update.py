"""`kv_cache_update_` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from .attention import write_rows


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
    """Write key and value [batch, new_tokens, num_kv_heads, head_dim] at the slots from seq_lens.

    A copy where the cache has the dtype of the key; int8 caches quantise each row. In place.
    """
    write_rows(k_cache, k_scale, key, seq_lens, ring)
    write_rows(v_cache, v_scale, value, seq_lens, ring)
