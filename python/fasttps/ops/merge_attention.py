"""The merge of attention over parts of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

_merge_attention = torch.ops.fasttps.merge_attention.default


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over a whole cache from attention over its parts, in any split.

    out = sum_i exp(lse_i - lse) out_i, lse = log sum_i exp(lse_i), base e: the (m, l, O) merge of
    GQA decode over a sequence-sharded cache, with l folded into the logarithm. A sink belongs to
    one part only: counted in each, it would weigh once a part.

    Args:
        outs: at least one float32 [batch, new_tokens, num_heads, head_dim], as `return_lse` gives.
        lses: as many float32 [batch, num_heads, new_tokens]. -inf: the part saw nothing.

    Returns:
        (out, lse) float32, contiguous, of those shapes; (0, -inf) where every part saw nothing.

    Raises:
        ValueError: no part, or a shape differs.
        TypeError: a dtype or device is wrong.
        RuntimeError: a gradient is asked for.
    """
    return _merge_attention(outs, lses)
