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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def decode_step(
    input: Tensor,
    weights: Sequence[Tensor],
    norms: Sequence[Tensor],
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
    window: int | None = None,
    kv_start: Tensor | None = None,
    k_scales: Sequence[Tensor] | None = None,
    v_scales: Sequence[Tensor] | None = None,
    embedding: Tensor | None = None,
    embedding_format: int = 0,
    embedding_group_size: int = 0,
    lm_head: Tensor | None = None,
    lm_head_format: int = 0,
    lm_head_group_size: int = 0,
    vocab_size: int = 0,
    argmax: bool = False,
) -> Tensor:
    """New tokens through the layers in float64; the result is rounded to float32."""
    hidden_size = norms[0].size(0)
    num_kv_heads, head_dim = k_caches[0].size(1), k_caches[0].size(3)
    if embedding is None:
        x = input.double()
    else:
        x = packed_embedding(
            input,
            embedding,
            format=embedding_format,
            rows=vocab_size,
            cols=hidden_size,
            group_size=embedding_group_size,
            dtype=torch.float64,
        )
    rows = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim, hidden_size)

    def project(x: Tensor, layer: int, which: int) -> Tensor:
        at = layer * MATRICES + which
        return packed_linear(
            x,
            weights[at],
            format=formats[at],
            rows=rows[which],
            group_size=group_sizes[at],
            int8_activation=int8_activation,
            bias=bias(layer, which),
        )

    def bias(layer: int, which: int) -> Tensor | None:
        return biases[layer * BIASES + which] if len(biases) else None

    for layer in range(len(k_caches)):
        normed = rms_norm(x, norms[2 * layer], norm_eps)
        query, key, value = (
            project(normed, layer, which).unflatten(-1, (-1, head_dim)) for which in range(3)
        )
        attended = rope_attention_decode(
            query,
            key,
            value,
            k_caches[layer],
            v_caches[layer],
            seq_lens,
            cos,
            sin,
            interleaved=interleaved,
            scale=scale,
            window=window,
            kv_start=kv_start,
            k_scale=None if k_scales is None else k_scales[layer],
            v_scale=None if v_scales is None else v_scales[layer],
        )
        assert isinstance(attended, Tensor)
        x = x + project(attended.flatten(-2), layer, 3)
        gate_up, down = layer * MATRICES + 4, layer * MATRICES + 5
        x = x + gate_up_silu_mlp(
            rms_norm(x, norms[2 * layer + 1], norm_eps),
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
    if len(norms) > 2 * len(k_caches):
        x = rms_norm(x, norms[-1], norm_eps)
    if lm_head is not None:
        x = packed_linear(
            x,
            lm_head,
            format=lm_head_format,
            rows=vocab_size,
            group_size=lm_head_group_size,
            int8_activation=int8_activation,
        )
    return x.argmax(-1) if argmax else x.float()
