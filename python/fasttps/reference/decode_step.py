"""`decode_step` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .gate_up_silu_mlp import gate_up_silu_mlp
from .packed_embedding import packed_embedding
from .packed_linear import packed_linear
from .rope_attention_decode import rope_attention_decode

MATRICES = 6  # q, k, v, o, gate_up, down
BIASES = 7  # q, k, v, o, gate, up, down


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension; x without a weight."""
    if weight is None:
        return x
    factor = weight.to(x.dtype) + offset
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * factor


def decode_step(
    input: Tensor,
    weights: Sequence[Tensor],
    norms: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    seq_lens: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    formats: Sequence[int],
    group_sizes: Sequence[int],
    num_heads: int,
    intermediate_size: int,
    norm_eps: float,
    int8_activation: bool = False,
    activation: str = "silu",
    interleaved: bool = False,
    scale: float | None = None,
    windows: Sequence[int] = (),
    ring: bool = False,
    kv_start: Tensor | None = None,
    k_scales: Sequence[Tensor] | None = None,
    v_scales: Sequence[Tensor] | None = None,
    head_norms: Sequence[Tensor | None] = (),
    out_norms: Sequence[Tensor | None] = (),
    norm_offset: float = 0.0,
    ropes: Sequence[int] = (),
    orders: Sequence[Tensor] | None = None,
    columns: Sequence[int] = (),
    softcap: float | None = None,
    residual_scale: float = 1.0,
    embedding: Tensor | None = None,
    embedding_format: int = 0,
    embedding_group_size: int = 0,
    embedding_scale: float = 1.0,
    lm_head: Tensor | None = None,
    lm_head_format: int = 0,
    lm_head_group_size: int = 0,
    vocab_size: int = 0,
    logits_scale: float = 1.0,
    logits_softcap: float | None = None,
    argmax: bool = False,
) -> Tensor:
    """New tokens through the layers in float64; the result is rounded to float32."""
    num_kv_heads, head_dim = k_caches[0].size(1), k_caches[0].size(3)
    if embedding is None:
        x = input.double()
        hidden_size = x.size(-1)
    else:
        hidden_size = next(n.size(0) for n in (*norms, *out_norms) if n is not None)
        x = embedding_scale * packed_embedding(
            input,
            embedding,
            format=embedding_format,
            rows=vocab_size,
            cols=hidden_size,
            group_size=embedding_group_size,
            dtype=torch.float64,
        )
    if cos.dim() == 3:
        cos, sin = cos[None], sin[None]
    rows = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim, hidden_size)

    def project(x: Tensor, layer: int, which: int) -> Tensor:
        at = layer * MATRICES + which
        return packed_linear(
            gathered(x, at),
            weights[at],
            format=formats[at],
            rows=rows[which],
            group_size=group_sizes[at],
            int8_activation=int8_activation,
            bias=bias(layer, which),
        )

    def gathered(x: Tensor, at: int) -> Tensor:
        """The columns of x in the order in which a weight has its own."""
        order = columns[at] if len(columns) else -1
        return x if order < 0 or orders is None else x[..., orders[order]]

    def bias(layer: int, which: int) -> Tensor | None:
        return biases[layer * BIASES + which] if len(biases) else None

    def norm(x: Tensor, weights: Sequence[Tensor | None], at: int) -> Tensor:
        return rms_norm(x, weights[at] if len(weights) else None, norm_eps, norm_offset)

    def norm_heads(x: Tensor, at: int) -> Tensor:
        """[batch, tokens, heads * head_dim] as [batch, tokens, heads, head_dim]."""
        weight = head_norms[at] if len(head_norms) else None
        heads = x.unflatten(-1, (-1, head_dim))
        if weight is None or weight.numel() == head_dim:
            return rms_norm(heads, weight, norm_eps, norm_offset)
        return rms_norm(x, weight, norm_eps, norm_offset).view_as(heads)

    for layer in range(len(k_caches)):
        normed = norm(x, norms, 2 * layer)
        query, key, value = (project(normed, layer, which) for which in range(3))
        window = windows[layer if len(windows) > 1 else 0] if len(windows) else 0
        table = ropes[layer] if len(ropes) else 0
        attended = rope_attention_decode(
            norm_heads(query, 2 * layer),
            norm_heads(key, 2 * layer + 1),
            value.unflatten(-1, (-1, head_dim)),
            k_caches[layer],
            v_caches[layer],
            seq_lens,
            None if table < 0 else cos[table],
            None if table < 0 else sin[table],
            interleaved=interleaved,
            scale=scale,
            window=window or None,
            ring=ring and window > 0,
            kv_start=kv_start,
            softcap=softcap,
            k_scale=None if k_scales is None else k_scales[layer],
            v_scale=None if v_scales is None else v_scales[layer],
        )
        assert isinstance(attended, Tensor)
        x = x + residual_scale * norm(project(attended.flatten(-2), layer, 3), out_norms, 2 * layer)
        gate_up, down = layer * MATRICES + 4, layer * MATRICES + 5
        added = gate_up_silu_mlp(
            gathered(norm(x, norms, 2 * layer + 1), gate_up),
            weights[gate_up],
            weights[down],
            gate_up_format=formats[gate_up],
            down_format=formats[down],
            intermediate_size=intermediate_size,
            gate_up_group_size=group_sizes[gate_up],
            down_group_size=group_sizes[down],
            int8_activation=int8_activation,
            activation=activation,
            gate_bias=bias(layer, 4),
            up_bias=bias(layer, 5),
            down_bias=bias(layer, 6),
        )
        x = x + residual_scale * norm(added, out_norms, 2 * layer + 1)
    if len(norms) > 2 * len(k_caches):
        x = norm(x, norms, -1)
    if lm_head is not None:
        x = packed_linear(
            x,
            lm_head,
            format=lm_head_format,
            rows=vocab_size,
            group_size=lm_head_group_size,
            int8_activation=int8_activation,
        )
        x = logits_scale * x
        if logits_softcap is not None:
            x = logits_softcap * torch.tanh(x / logits_softcap)
    return x.argmax(-1) if argmax else x.float().contiguous()
