"""The parts of attention over a static KV cache, in plain PyTorch.

Written to be read and trusted, not to be fast: the scores of every slot are formed, then
limited. Arguments are taken as valid; the ops check theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that a twin computes in: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def apply_rope(x: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    """x * cos + rotate(x) * sin on the first rotary_dim elements of each head; the rest is x.

    x: [batch, tokens, heads, head_dim] in the compute type. cos, sin: [1 or batch, tokens,
    rotary_dim]. halves: rotate(x) = cat(-x[r/2:], x[:r/2]); interleaved: rotate(x)[2i] =
    -x[2i+1], rotate(x)[2i+1] = x[2i].
    """
    if cos is None or sin is None:
        return x
    rotary_dim = cos.size(-1)
    cos, sin = cos.to(x.dtype).unsqueeze(2), sin.to(x.dtype).unsqueeze(2)
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        rotated = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    else:
        rotated = torch.cat((-turning[..., rotary_dim // 2 :], turning[..., : rotary_dim // 2]), -1)
    return torch.cat((turning * cos + rotated * sin, rest), dim=-1)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int8 rows and their float32 scales: scale = max|row| / 127, q = round-half-even(x / scale).

    A row of zeros has scale 0. A row that holds NaN or inf keeps it in its scale, so that the
    row dequantises to NaN.
    """
    rows = rows.to(torch.float32)
    scale = rows.abs().amax(-1) / 127
    quantized = (rows / scale.unsqueeze(-1)).round().nan_to_num(0.0).clamp(-127, 127)
    return quantized.to(torch.int8), scale


def write_rows(
    cache: Tensor, scale: Tensor | None, rows: Tensor, seq_lens: Tensor, ring: bool
) -> None:
    """Write rows [batch, new_tokens, num_kv_heads, head_dim] at the slots from seq_lens on.

    ring: slot = position mod max_seq_len; new_tokens is at most max_seq_len.
    """
    tokens = torch.arange(rows.size(1), device=cache.device)
    for sequence, first in enumerate(seq_lens.expand(cache.size(0)).tolist()):
        slots = (first + tokens) % cache.size(2) if ring else first + tokens
        new = rows[sequence].transpose(0, 1)
        if scale is None:
            cache[sequence][:, slots] = new.to(cache.dtype)
        else:
            cache[sequence][:, slots], scale[sequence][:, slots] = quantize_rows(new)


def read_rows(cache: Tensor, scale: Tensor | None, slots: int, dtype: torch.dtype) -> Tensor:
    """The first `slots` rows of a cache in `dtype`, dequantised."""
    rows = cache[:, :, :slots].to(dtype)
    return rows if scale is None else rows * scale[:, :, :slots, None].to(dtype)


def visible_slots(
    kv_len: Tensor,
    query_start: Tensor,
    new_tokens: int,
    slots: int,
    *,
    ring: bool,
    window: int | None,
    kv_start: Tensor | None,
) -> Tensor:
    """bool [batch, 1, new_tokens, slots]: what each query token may attend, without the mask.

    kv_len, query_start: [batch]. In a ring of `slots`, slot s holds the newest position
    p < kv_len with p mod slots == s.
    """
    device = kv_len.device
    position = torch.arange(slots, device=device).expand(kv_len.size(0), 1, 1, slots)
    kv_len = kv_len.view(-1, 1, 1, 1)
    if ring:
        position = kv_len - 1 - (kv_len - 1 - position) % slots
    token = torch.arange(new_tokens, device=device).view(1, 1, -1, 1)
    query = query_start.view(-1, 1, 1, 1) + token
    visible = (position >= 0) & (position < kv_len) & (position <= query)
    if window is not None:
        visible = visible & (position > query - window)
    if kv_start is not None:
        visible = visible & (position >= kv_start.view(-1, 1, 1, 1))
    return visible


def weighted_values(weights: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    """weights @ values over the visible slots alone: 0 * NaN of a hidden slot adds nothing.

    weights, visible: [batch, num_kv_heads, rows, slots]; values: [batch, num_kv_heads, slots,
    head_dim].
    """
    finite = values.isfinite()
    out = weights @ values.masked_fill(~finite, 0)
    non_finite = values.masked_fill(finite, 0)
    seen = ~finite.all(-1) & visible.any(2)
    for sequence, head, slot in seen.nonzero().tolist():
        added = weights[sequence, head, :, slot, None] * non_finite[sequence, head, slot]
        out[sequence, head] += added.masked_fill(~visible[sequence, head, :, slot, None], 0)
    return out


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out [batch, new_tokens, num_heads, head_dim], lse [batch, num_heads, new_tokens]).

    query: rotated, of out's shape; keys, values: [batch, num_kv_heads, slots, head_dim], all of
    one dtype. visible: bool, expands to [batch, num_heads, new_tokens, slots]. A row that sees
    nothing gives (0, -inf), with a sink (0, sink).
    """
    batch, new_tokens, num_heads, head_dim = query.shape
    num_kv_heads, slots = keys.shape[1:3]
    # Query heads of one KV head become rows beside its tokens: row = group * new_tokens + token.
    rows = (batch, num_kv_heads, num_heads // num_kv_heads * new_tokens)
    visible = visible.expand(batch, num_heads, new_tokens, slots).reshape(*rows, slots)
    grouped_query = query.transpose(1, 2).reshape(*rows, head_dim)
    with torch.autocast(query.device.type, enabled=False):
        scores = grouped_query @ keys.transpose(2, 3) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        sink = scores.new_full((*rows, 1), -torch.inf)
        if sinks is not None:
            sink = sinks.to(query.dtype).view(num_heads, 1).expand(batch, num_heads, new_tokens)
            sink = sink.reshape(*rows, 1)
        # An empty row has no maximum: -inf is never subtracted from -inf there.
        top = torch.cat((scores, sink), dim=-1).amax(-1, keepdim=True)
        top = top.masked_fill(~visible.any(-1, keepdim=True) & (top == -torch.inf), 0)
        weights = torch.exp(scores - top).masked_fill(~visible, 0)
        total = weights.sum(-1, keepdim=True) + torch.exp(sink - top)
        lse = (top + total.log()).view(batch, num_heads, new_tokens)
        out = weighted_values(weights / total.masked_fill(total == 0, 1), visible, values)
    return out.view(batch, num_heads, new_tokens, head_dim).transpose(1, 2).contiguous(), lse
