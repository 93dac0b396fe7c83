"""Attention on a layer of a StaticKVCache: RoPE, the write and the rest in one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttps.kv_cache import SlidingKVLayer, StaticKVLayer
from fasttps.models.attention_interface import attend
from fasttps.models.attention_mask import bool_mask, is_within_diagonal


@dataclass(frozen=True)
class Rules:
    """What an attention does besides softmax(q k^T) v, as the ops call it."""

    scale: float
    is_causal: bool = True
    interleaved: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Those that a write alone has too are not among them."""
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}


def attend_static(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: StaticKVLayer,
    rope: tuple[Tensor, Tensor] | None,
    attn_mask: Any,
    rules: Rules,
) -> Tensor:
    """RoPE, the write into `layer` and attention to all that it then holds, in one op.

    query: [batch, new_tokens, num_heads, head_dim]; key, value: the same of num_kv_heads. They may
    have more tokens, of which the last have a query; cos and sin have as many as they.
    """
    attn_mask = bool_mask(attn_mask, query.size(1))
    seq_lens = layer.reserve(key, value)
    dtype = query.dtype
    if layer.k_scale is None and layer.dtype != dtype:
        query, key, value = query.to(layer.dtype), key.to(layer.dtype), value.to(layer.dtype)
    if rope is not None and rope[0].dtype not in (torch.float32, query.dtype):
        rope = rope[0].float(), rope[1].float()
    call = _Call(layer, rope or (), rules)
    if isinstance(layer, SlidingKVLayer):
        out = call.in_pieces(query, key, value, seq_lens, attn_mask)
    else:
        out = call.at_once(query, key, value, seq_lens, attn_mask)
    layer.advance(key.size(1))
    return out if out.dtype == dtype else out.to(dtype)


class _Call:
    """The op on one layer."""

    def __init__(self, layer: StaticKVLayer, rope: tuple[Tensor, ...], rules: Rules) -> None:
        self.layer = layer
        self.rope = rope
        self.rules = rules
        self.k_cache: Any = layer.keys
        self.v_cache: Any = layer.values
        self.options: dict[str, Any] = {
            "k_scale": layer.k_scale,
            "v_scale": layer.v_scale,
            "interleaved": rules.interleaved or None,
        }

    def at_once(
        self, query: Tensor, key: Tensor, value: Tensor, seq_lens: Tensor, mask: Tensor | None
    ) -> Tensor:
        new_tokens, first = query.size(1), key.size(1) - query.size(1)
        window: int | None = self.rules.window
        query_start: Tensor | int | None = None  # after what the cache holds
        if new_tokens > 1 and (mask is not None or not self.rules.is_causal):
            # The mask alone decides, but where it leaves nothing past the diagonal.
            if torch.compiler.is_compiling():
                query_start, window = seq_lens + key.size(1), None
            else:
                end = self.layer.filled + key.size(1)
                self._check_one_length(mask)
                if mask is None or not is_within_diagonal(mask, end - new_tokens):
                    if mask is None and window is not None:
                        raise ValueError(
                            "fasttps attention: a bidirectional sliding window wants a mask"
                        )
                    query_start, window = end, None
        rope = self.rope
        if first > 0:
            # For the write alone: the keys are their own queries, each of which sees itself.
            k, v, *angles = (x[:, :first] for x in (key, value, *rope))
            k_cache, v_cache = self.k_cache, self.v_cache
            attend(k, k, v, k_cache, v_cache, seq_lens, *angles, window=1, **self.options)
            key, value, *angles = (x[:, first:] for x in (key, value, *rope))
            rope = tuple(angles)
            seq_lens = seq_lens + first
        return attend(
            query,
            key,
            value,
            self.k_cache,
            self.v_cache,
            seq_lens,
            *rope,
            attn_mask=mask,
            query_start=query_start,
            window=window,
            **self.options,
            **self.rules.options,
        )

    def in_pieces(
        self, query: Tensor, key: Tensor, value: Tensor, seq_lens: Tensor, mask: Tensor | None
    ) -> Tensor:
        """On a ring, which has room for the window of so many tokens at once."""
        layer: Any = self.layer
        window = self.rules.window
        if window is None or window > layer.window:
            raise ValueError(
                f"fasttps attention: window wanted at most the {layer.window} of the sliding layer "
                f"of the cache, got {window}"
            )
        total, first = key.size(1), key.size(1) - query.size(1)
        compiling = torch.compiler.is_compiling()
        start: Any = seq_lens if compiling else layer.filled
        if not compiling:
            self._check_causal(mask, start + first, start + total)
        outs = []
        at = 0
        while at < total:
            # Rows without a query first, each of which sees itself: for the write alone.
            end = min(at + layer.piece, first if at < first else total)
            k, v, *rope = (x[:, at:end] for x in (key, value, *self.rope))
            rules: dict[str, Any] = {"window": 1}
            queries = k
            if at >= first:
                rows = slice(at - first, end - first)
                queries, rules = query[:, rows], {"window": window, **self.rules.options}
                if mask is not None:
                    rules["attn_mask"] = layer.slots_of_mask(
                        mask[:, :, rows], start + end, start + total
                    )
            piece = seq_lens + at if at else seq_lens
            rules |= self.options
            k_cache, v_cache = self.k_cache, self.v_cache
            out = attend(queries, k, v, k_cache, v_cache, piece, *rope, ring=True, **rules)
            if at >= first:
                outs.append(out)
            at = end
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _check_causal(self, mask: Tensor | None, query_start: int, end: int) -> None:
        self._check_one_length(mask)
        causal = self.rules.is_causal
        if mask is not None and mask.size(2) > 1:
            causal = is_within_diagonal(mask, query_start - (end - mask.size(-1)))
        if not causal:
            raise ValueError(
                "fasttps attention: on a sliding layer of a cache a query may not see later keys"
            )

    def _check_one_length(self, mask: Tensor | None) -> None:
        if mask is not None and mask.size(2) > 1 and self.layer.steps.differ:
            raise ValueError(
                "fasttps attention: attn_mask of several tokens wanted sequences of one length, "
                "got a cache with set_seq_lens"
            )
