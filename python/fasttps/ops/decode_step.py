"""A few new tokens through whole decoder layers, and through the model's ends, as one op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_out = torch.ops.fasttps.decode_step.default
_argmax = torch.ops.fasttps.decode_step.argmax


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
    """Each layer: x += o(attention(norm(x))), x += down(act(gate(norm(x))) * up(norm(x))).

    One parallel region for all layers: threads meet at barriers, five a layer. Attention is that
    of `rope_attention_decode`, the MLP that of `gate_up_silu_mlp`, norm(x) is x / sqrt(mean(x^2) +
    norm_eps) * (weight + norm_offset) (RMSNorm, arXiv:1910.07467). x stays in float32 from the
    first layer to the last; key and value are rounded once, to the cache's dtype.

    Args:
        input: int64 [batch, new_tokens] token ids, with `embedding`; or [batch, new_tokens,
            hidden_size] float32, bfloat16 or float16. new_tokens * num_heads / num_kv_heads is at
            most 64.
        weights: six packed weights a layer, from `pack_weight` and `pack_gate_up`: q, k, v, o,
            gate_up, down. All layers have the same shapes; formats are free.
        norms: two a layer, [hidden_size] or None: before the attention and before the MLP; one
            more behind them is the final norm, applied after the last layer.
        biases: none, or seven a layer: q, k, v, o, gate, up, down; each [rows] or None.
        k_caches, v_caches: one a layer, [batch, num_kv_heads, slots, head_dim], float32,
            bfloat16, float16 or, with `k_scales` and `v_scales`, int8. Written at slot seq_lens.
        seq_lens: int64, [] or [batch]: tokens already in the caches. Not changed.
        cos, sin: [1 or batch, new_tokens, rotary_dim], as in `rope_attention_decode`, or several
            of them: [tables, 1 or batch, new_tokens, rotary_dim].
        formats, group_sizes: of each of `weights`.
        intermediate_size: rows of gate and of up.
        int8_activation: multiply quantised weights by activations of 8 bits, as in
            `packed_linear`.
        activation: "silu", "gelu" or "gelu_tanh".
        interleaved, scale, kv_start, softcap: as in `rope_attention_decode`.
        windows: the window of each layer, one for all, or none; 0: all positions.
        ring: layers with a window keep rings: slot = position mod slots.
        k_scales, v_scales: one a layer, float32 [batch, num_kv_heads, slots].
        head_norms: none, or two a layer: of q and of k before RoPE, [head_dim] for each head,
            [heads * head_dim] for one norm over all of them, or None.
        out_norms: none, or two a layer, [hidden_size] or None: of what attention and MLP add.
        norm_offset: added to the weights of all norms (Gemma's 1).
        ropes: the table of cos and sin of each layer, -1: it does not rotate; none: the first.
        orders, columns: int64 [cols] lists of columns, and for each of `weights` but down the list
            in whose order its columns are packed (act-order), -1: in their own; or none.
        residual_scale: factor of what attention and MLP add.
        embedding: packed [vocab_size, hidden_size].
        lm_head: packed [vocab_size, hidden_size]; may be the embedding itself.
        embedding_scale, logits_scale: factors of the embedding's rows and of the logits.
        logits_softcap: logits become softcap * tanh(logits / softcap), after their scale.
        argmax: return the first of the largest logits of each token in place of all; before their
            soft-cap, which keeps the order but for rounding.

    Returns:
        float32 logits [batch, new_tokens, vocab_size] with `lm_head`, else x [batch, new_tokens,
        hidden_size] in float32; with `argmax` int64 [batch, new_tokens].

    Raises:
        ValueError: a shape, size, stride, format, count or value is wrong, or a cache would
            overflow. Nothing was written.
        TypeError: a dtype or device is wrong. Nothing was written.
        RuntimeError: a gradient is asked for.
    """
    op = _argmax if argmax else _out
    return op(
        input,
        weights,
        norms,
        biases,
        head_norms,
        out_norms,
        k_caches,
        v_caches,
        seq_lens,
        cos,
        sin,
        formats=formats,
        group_sizes=group_sizes,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
        norm_eps=norm_eps,
        int8_activation=int8_activation,
        activation=activation,
        interleaved=interleaved,
        scale=scale,
        windows=windows,
        ring=ring,
        kv_start=kv_start,
        k_scales=k_scales,
        v_scales=v_scales,
        norm_offset=norm_offset,
        ropes=ropes,
        orders=orders,
        columns=columns,
        softcap=softcap,
        residual_scale=residual_scale,
        embedding=embedding,
        embedding_format=embedding_format,
        embedding_group_size=embedding_group_size,
        embedding_scale=embedding_scale,
        lm_head=lm_head,
        lm_head_format=lm_head_format,
        lm_head_group_size=lm_head_group_size,
        vocab_size=vocab_size,
        logits_scale=logits_scale,
        logits_softcap=logits_softcap,
    )


class DecodeStep:
    """`decode_step` on the CPU with its weights and caches bound: the same results, sooner.

    The op takes hundreds of tensors apart for each token; this looks at each only whether it is
    still the memory that it was, and begins anew where one is not. Values may change in place,
    but for those of `orders`. Keeps the tensors alive.

    Args: those of `decode_step` that stay the same from token to token.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        norms: Sequence[Tensor | None],
        biases: Sequence[Tensor | None],
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
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
    ) -> None:
        self._run = torch.classes.fasttps.DecodeStep(
            weights,
            norms,
            biases,
            list(head_norms),
            list(out_norms),
            k_caches,
            v_caches,
            formats,
            group_sizes,
            num_heads,
            intermediate_size,
            norm_eps,
            int8_activation,
            activation,
            interleaved,
            scale,
            list(windows),
            ring,
            k_scales,
            v_scales,
            norm_offset,
            list(ropes),
            orders,
            list(columns),
            softcap,
            residual_scale,
            embedding,
            embedding_format,
            embedding_group_size,
            embedding_scale,
            lm_head,
            lm_head_format,
            lm_head_group_size,
            vocab_size,
            logits_scale,
            logits_softcap,
        ).run

    def __call__(
        self,
        input: Tensor,
        seq_lens: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        kv_start: Tensor | None = None,
        argmax: bool = False,
    ) -> Tensor:
        """One step; arguments, result and errors are those of `decode_step`.

        Raises:
            RuntimeError: gradients are enabled.
        """
        return self._run(input, seq_lens, cos, sin, kv_start, argmax)
