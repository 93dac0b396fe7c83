"""`merge_attention` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import compute_dtype


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """out = sum_i exp(lse_i - lse) out_i, lse = log sum_i exp(lse_i), base e.

    outs: [batch, new_tokens, num_heads, head_dim] each; lses: [batch, num_heads, new_tokens]
    each. A part with lse -inf saw nothing and adds nothing; where all parts are empty the result
    is (0, -inf).
    """
    dtype = compute_dtype(outs[0].dtype)
    parts, lse_parts = torch.stack(outs).to(dtype), torch.stack(lses).to(dtype)
    empty = lse_parts == -torch.inf
    top = lse_parts.amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(lse_parts - top)
    total = weights.sum(0)
    lse = top + total.log()
    share = weights / total.masked_fill(total == 0, 1)
    added = share.transpose(2, 3).unsqueeze(-1) * parts
    out = added.masked_fill(empty.transpose(2, 3).unsqueeze(-1), 0).sum(0)
    return out, lse
