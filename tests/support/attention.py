"""Inputs of the attention ops, and what PyTorch makes of them in float64 and in their dtype."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fasttps import reference
from fasttps.reference import attention as reference_attention

NAN = float("nan")


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of a seed, rounded to `dtype`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rope_tables(
    positions: Tensor, rotary_dim: int, interleaved: bool = False, theta: float = 1e4
) -> tuple[Tensor, Tensor]:
    """float32 cos, sin [*positions.shape, rotary_dim]; the angles are formed in float64."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles = positions.double().unsqueeze(-1) * theta**-exponent
    pairs = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return pairs.cos().float(), pairs.sin().float()


def attention_inputs(
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    new_tokens: int = 1,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    max_seq_len: int = 24,
    past: int | list[int] = 7,
    rotary_dim: int = 0,
    interleaved: bool = False,
    int8: bool = False,
    attend_only: bool = False,
    transposed: bool = False,
    unused: float = NAN,
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments of an attention op, on the CPU.

    past: tokens in the cache. Slots that hold no token are filled with `unused`. rotary_dim 0:
    no RoPE. transposed: query, key and value are views of [batch, heads, tokens, head_dim], the
    caches are two halves of one buffer. options: taken over as they are.
    """
    if transposed:
        shape = (batch, -1, new_tokens, head_dim)
    else:
        shape = (batch, new_tokens, -1, head_dim)

    def projected(seed: int, heads: int) -> Tensor:
        x = randn(seed, *(heads if size == -1 else size for size in shape), dtype=dtype)
        return x.transpose(1, 2) if transposed else x

    kv = randn(seed + 3, batch, num_kv_heads, 2, max_seq_len, head_dim, dtype=dtype)
    k_cache, v_cache = kv.unbind(2) if transposed else (kv[:, :, 0].clone(), kv[:, :, 1].clone())
    seq_lens = torch.tensor(past, dtype=torch.int64)
    if options.get("ring"):
        past_slots = seq_lens.clamp(max=max_seq_len)
    else:
        past_slots = seq_lens
    empty = torch.arange(max_seq_len) >= past_slots.expand(batch).unsqueeze(-1)
    for cache in (k_cache, v_cache):
        cache.masked_fill_(empty[:, None, :, None], unused)

    inputs: dict[str, Any] = {
        "query": projected(seed, num_heads),
        "key": None if attend_only else projected(seed + 1, num_kv_heads),
        "value": None if attend_only else projected(seed + 2, num_kv_heads),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "seq_lens": seq_lens,
    }
    if int8:
        for name in ("k", "v"):
            rows, scale = reference_attention.quantize_rows(inputs[f"{name}_cache"])
            inputs[f"{name}_cache"], inputs[f"{name}_scale"] = rows, scale
    if rotary_dim:
        positions = seq_lens.view(-1, 1) + torch.arange(new_tokens)
        cos, sin = rope_tables(positions, rotary_dim, interleaved)
        inputs |= {"cos": cos, "sin": sin, "interleaved": interleaved}
    return inputs | options


def uniform_probe(
    *,
    kv_len: int,
    new_tokens: int = 1,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 8,
    max_seq_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Any]:
    """A query of zeros over value rows j = j: the output is the mean of the positions seen.

    The last new_tokens of the kv_len positions are new.
    """
    past = kv_len - new_tokens
    max_seq_len = max_seq_len or kv_len
    values = torch.arange(kv_len).to(dtype).view(1, 1, -1, 1)
    values = values.expand(1, num_kv_heads, kv_len, head_dim)
    k_cache = randn(1, 1, num_kv_heads, max_seq_len, head_dim, dtype=dtype)
    v_cache = torch.full_like(k_cache, NAN)
    v_cache[:, :, :past] = values[:, :, :past]
    return {
        "query": torch.zeros(1, new_tokens, num_heads, head_dim, dtype=dtype),
        "key": randn(2, 1, new_tokens, num_kv_heads, head_dim, dtype=dtype),
        "value": values[:, :, past:].transpose(1, 2).clone(),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "seq_lens": torch.tensor(past),
    } | options


def probe_means(out: Tensor) -> list[float]:
    """What a uniform probe saw: one number a new token, after a check that all elements agree."""
    rows = out[0].float()
    means = rows[:, :1, :1]
    assert torch.allclose(rows, means.expand_as(rows), rtol=1e-6, atol=0)
    return means.flatten().tolist()


def copies(inputs: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The inputs with tensors of their own; dtype: of every 16- or 32-bit float among them."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        converted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.to(converted, copy=True)

    return {name: copy(value) for name, value in inputs.items()}


def attention_in_float64(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Exact (out, lse): float64 throughout, the rotated key not rounded. The inputs are kept."""
    return reference.rope_attention_decode(**copies(inputs, torch.float64), return_lse=True)


def without_key(inputs: dict[str, Any], caches: dict[str, Tensor]) -> dict[str, Any]:
    """The same attention over caches that already hold the new tokens, dequantised to float64.

    For int8 caches: accuracy is judged on the numbers that they hold.
    """
    inputs = copies(inputs)
    query_start = inputs.get("query_start")
    inputs["query_start"] = inputs["seq_lens"] if query_start is None else query_start
    if inputs["key"] is not None:
        inputs["seq_lens"] = inputs["seq_lens"] + inputs["query"].size(1)
    for name in ("k", "v"):
        scale = inputs.pop(f"{name}_scale").double() if f"{name}_scale" in inputs else None
        cache = caches[f"{name}_cache"].double()
        scale = None if scale is None else caches[f"{name}_scale"].double()
        inputs[f"{name}_cache"] = cache if scale is None else cache * scale.unsqueeze(-1)
    return inputs | {"key": None, "value": None}


def attention_in_same_dtype(inputs: dict[str, Any]) -> Tensor:
    """What a PyTorch user computes in the dtype of the query: rotate, write, attend.

    scaled_dot_product_attention, or scores, softmax and values in turn where it lacks the option.
    Rows that may attend nothing are zeros. The inputs are kept.
    """
    inputs = copies(inputs)
    query, seq_lens = inputs["query"], inputs["seq_lens"]
    batch, new_tokens, num_heads, head_dim = query.shape
    rope = (inputs.get("cos"), inputs.get("sin"), inputs.get("interleaved", False))
    ring = inputs.get("ring", False)
    seq_lens = seq_lens.expand(batch)
    kv_len = seq_lens
    k_cache, v_cache = inputs["k_cache"].to(query.dtype), inputs["v_cache"].to(query.dtype)
    if inputs["key"] is not None:
        key = reference_attention.apply_rope(inputs["key"], *rope)
        reference_attention.write_rows(k_cache, None, key, seq_lens, ring)
        reference_attention.write_rows(v_cache, None, inputs["value"], seq_lens, ring)
        kv_len = seq_lens + new_tokens
    slots = k_cache.size(2) if ring else int(kv_len.max())
    query_start = inputs.get("query_start")
    visible = reference_attention.visible_slots(
        kv_len,
        seq_lens if query_start is None else query_start.expand(batch),
        new_tokens,
        slots,
        ring=ring,
        window=inputs.get("window"),
        kv_start=inputs.get("kv_start"),
    )
    if inputs.get("attn_mask") is not None:
        visible = visible & inputs["attn_mask"][..., :slots]
    visible = visible.expand(batch, num_heads, new_tokens, slots)

    # SDPA is no oracle for NaN in hidden slots.
    hidden = ~visible.unflatten(1, (k_cache.size(1), -1)).any(2).any(2).unsqueeze(-1)
    keys = k_cache[:, :, :slots].masked_fill(hidden, 0)
    values = v_cache[:, :, :slots].masked_fill(hidden, 0)
    rotated = reference_attention.apply_rope(query, *rope).transpose(1, 2)
    scale = inputs.get("scale") or head_dim**-0.5
    if inputs.get("softcap") is None and inputs.get("sinks") is None:
        out = functional.scaled_dot_product_attention(
            rotated, keys, values, attn_mask=visible, scale=scale, enable_gqa=True
        )
    else:
        group = num_heads // keys.size(1)
        scores = rotated @ keys.repeat_interleave(group, 1).transpose(2, 3) * scale
        if inputs.get("softcap") is not None:
            scores = inputs["softcap"] * torch.tanh(scores / inputs["softcap"])
        scores = scores.float().masked_fill(~visible, -math.inf)
        if inputs.get("sinks") is not None:
            sink = inputs["sinks"].float().view(1, -1, 1, 1).expand(batch, -1, new_tokens, 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., :slots].to(query.dtype)
        out = weights @ values.repeat_interleave(group, 1)
    return out.masked_fill(~visible.any(-1, keepdim=True), 0).transpose(1, 2)
