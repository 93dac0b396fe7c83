"""What transformers passes as a mask, as the bool mask that the ops take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def bool_mask(mask: Any, new_tokens: int) -> Tensor | None:
    """`mask` as bool [1 or batch, 1 or num_heads, new_tokens, kv_len], True = attend.

    An additive mask (that of the eager attention) is taken if it adds nothing but 0 and -inf; the
    lowest finite numbers of its dtype, or two of them added, count as -inf.

    Raises:
        TypeError: `mask` is neither bool nor floating.
        ValueError: it adds something else, or has other than 4 dimensions where that is unclear.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"fasttps attention: attention_mask wanted a Tensor, got {type(mask)}")
    if mask.is_floating_point():
        mask = _from_additive(mask)
    elif mask.dtype != torch.bool:
        raise TypeError(f"fasttps attention: attention_mask wanted bool, got {mask.dtype}")
    if mask.dim() != 4 or mask.size(2) not in (1, new_tokens):
        raise ValueError(
            "fasttps attention: attention_mask wanted [batch or 1, num_heads or 1, "
            f"{new_tokens} new tokens, keys], got {list(mask.shape)}"
        )
    return mask if mask.size(2) == new_tokens else mask.expand(-1, -1, new_tokens, -1)


def _from_additive(mask: Tensor) -> Tensor:
    attend = mask == 0
    if _has_no_values(mask) and not torch.compiler.is_compiling():
        return attend
    blocked = mask <= torch.finfo(mask.dtype).min / 2
    other = mask[~(attend | blocked)]
    if other.numel() > 0:
        raise ValueError(
            "fasttps attention: an additive attention_mask may hold 0 and -inf only, got "
            f"{other[0].item()}; position biases are not supported"
        )
    return attend


def is_within_diagonal(mask: Tensor, query_start: int) -> bool:
    """Whether no query i may see past key query_start + i, so that the op may skip the rest.

    A graph does not look at values, and some tensors have none: there it is not known.
    """
    if torch.compiler.is_compiling() or _has_no_values(mask):
        return False
    return not bool(mask.triu(query_start + 1).any())


def _has_no_values(mask: Tensor) -> bool:
    return mask.is_meta or is_fake(mask)
