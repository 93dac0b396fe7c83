"""Where the parts of a decoder lie, and what `decode_step` is told of them. Knows no family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.packed_linear import PackedLinear
from fasttps.models.packed_weight import PackedTensor


@dataclass(frozen=True)
class Anatomy:
    """The classes of a family's decoder, and its names for norms.

    Attributes:
        norms: those before attention and MLP, None where there is none; `out_norms` those of what
            the two add.
        norm_offset: added to the weights of norms.
        norm_eps: the attribute of a norm that has its epsilon.
    """

    model: type
    layer: type
    norm: type
    attention: type[FusedAttention]
    mlp: type
    norms: tuple[str | None, str | None] = ("input_layernorm", "post_attention_layernorm")
    out_norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    norm_eps: str = "variance_epsilon"

    def norms_of(self, layer: Any) -> list[Any]:
        """The norms of a layer in the order of the op's `norms`, None where there is none."""
        return [None if name is None else getattr(layer, name) for name in self.norms]

    def out_norms_of(self, layer: Any) -> list[Any]:
        return [getattr(layer, name) for name in self.out_norms or ()]


@dataclass
class Parts:
    """A model as the op takes it.

    `settings` are where numbers lie that the op was told: dict, key.
    """

    weights: list[PackedTensor] = field(default_factory=list)  # q, k, v, o, gate_up, down
    norms: list[Tensor | None] = field(default_factory=list)
    head_norms: list[Tensor | None] = field(default_factory=list)
    out_norms: list[Tensor | None] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    ropes: list[int] = field(default_factory=list)
    orders: list[Tensor] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)  # of each weight its order, -1: none
    lm_head: PackedTensor | None = None
    embedding: PackedTensor | None = None  # None: a plain weight, whose rows are taken before
    options: dict[str, Any] = field(default_factory=dict)
    settings: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    @property
    def lists(self) -> dict[str, Any]:
        """Those of one element for each layer, as the op takes them."""
        biases = [bias for w in self.weights for bias in _pair(w.bias)]
        return {
            "biases": biases if any(bias is not None for bias in biases) else [],
            "head_norms": self.head_norms if _any(self.head_norms) else [],
            "out_norms": self.out_norms,
            "windows": self.windows if any(self.windows) else [],
            "ropes": self.ropes if any(self.ropes) else [],
            "orders": self.orders or None,
            "columns": self.columns if self.orders else [],
        }

    def order(self, columns: Tensor | None) -> int:
        """Which of `orders` these columns are in; q, k and v often share one."""
        if columns is None:
            return -1
        if not self.orders or not torch.equal(self.orders[-1], columns):
            self.orders.append(columns)
        return len(self.orders) - 1


def _is(module: Any, kind: type) -> bool:
    return type(module) is kind


def _any(norms: Sequence[Tensor | None]) -> bool:
    return any(norm is not None for norm in norms)


def _pair(bias: Any) -> tuple[Tensor | None, ...]:
    return bias if isinstance(bias, tuple) else (bias,)


def parts_of(anatomy: Anatomy, decoder: Any, head: Any, num_heads: int) -> Parts | str:
    """The parts of a decoder and its head, or why the op cannot run them."""
    if not _is(decoder, anatomy.model):
        return f"its model is a {type(decoder).__name__}"
    if len(decoder.layers) != decoder.config.num_hidden_layers:
        return "not every layer of the config is there"
    parts = Parts(settings=[(vars(decoder.config), "num_hidden_layers")])
    for at, layer in enumerate(decoder.layers):
        reason = next(_layer(anatomy, at, layer, parts), None)
        if reason is not None:
            return reason
    if type(decoder.norm) is not anatomy.norm or type(head) is not PackedLinear:
        return f"the ends are a {type(decoder.norm).__name__} and a {type(head).__name__}"
    if head.bias is not None:
        return "lm_head has a bias"
    if head.packed_weight is None:
        return "not every weight is packed"
    if head.packed_weight.columns is not None:
        return "lm_head has its columns reordered (act-order)"
    parts.norms.append(decoder.norm.weight)
    parts.lm_head = head.packed_weight
    parts.embedding = getattr(decoder.embed_tokens, "packed_weight", None)
    every_norm = [decoder.norm, *(n for x in decoder.layers for n in _norms(anatomy, x))]
    attentions = [layer.self_attn for layer in decoder.layers]
    eps = {getattr(norm, anatomy.norm_eps) for norm in every_norm}
    rules = [attention.rules(True) for attention in attentions]
    alike = {(rule.scale, rule.softcap, rule.interleaved) for rule in rules}
    if len(eps) > 1 or len(alike) > 1:
        return "layers differ in scaling, soft-cap or epsilon"
    quantized = [w for w in (*parts.weights, parts.lm_head) if w.format.is_quantized]
    int8 = {w.int8_activation for w in quantized} or {False}
    if len(int8) > 1:
        return "some weights take int8 activations and some do not"
    parts.settings += [(vars(norm), anatomy.norm_eps) for norm in every_norm]
    for attention in attentions:
        own = ("scaling", "is_causal", "sliding_window", "attn_logit_softcapping", "use_rope")
        parts.settings += [(vars(attention), name) for name in own if name in vars(attention)]
    parts.options = {
        "num_heads": num_heads,
        "intermediate_size": parts.weights[4].rows,  # of gate_up
        "norm_eps": eps.pop(),
        "norm_offset": anatomy.norm_offset,
        "int8_activation": int8.pop(),
        "activation": decoder.layers[0].mlp.function,
        "scale": rules[0].scale,
        "softcap": rules[0].softcap,
        "interleaved": rules[0].interleaved,
        "vocab_size": parts.lm_head.rows,
    }
    return parts


def _norms(anatomy: Anatomy, layer: Any) -> list[Any]:
    """All of a layer."""
    attention = layer.self_attn
    heads = [getattr(attention, name) for name in attention.norms or ()]
    return [n for n in anatomy.norms_of(layer) if n] + anatomy.out_norms_of(layer) + heads


def _layer(anatomy: Anatomy, at: int, layer: Any, parts: Parts) -> Iterator[str]:
    """Adds a layer to the parts; what it yields is why that is not possible."""
    if not _is(layer, anatomy.layer):
        yield f"layer {at} is a {type(layer).__name__}"
        return
    attention, mlp = layer.self_attn, layer.mlp
    for module, kind in ((attention, anatomy.attention), (mlp, anatomy.mlp)):
        if not _is(module, kind):
            yield f"layer {at} has a {type(module).__name__}, not a {kind.__name__}"
            return
    for norm in _norms(anatomy, layer):
        if type(norm) is not anatomy.norm:
            yield f"layer {at} has a {type(norm).__name__}, not a {anatomy.norm.__name__}"
    if attention.layer_idx != at or not attention.is_causal:
        yield f"the attention of layer {at} is not causal, or of another layer"
    rules = attention.rules(True)
    if rules.sinks is not None:
        yield f"the attention of layer {at} has sinks"
    projections = attention.packed_projections()
    if isinstance(projections, str):
        yield f"layer {at}: {projections}"
        return
    weights = [*projections, mlp.packed_gate_up, mlp.packed_down]
    if any(weight is None for weight in weights):
        yield "not every weight is packed"
        return
    parts.weights += weights
    parts.columns += [parts.order(weight.columns) for weight in weights]
    parts.norms += [None if norm is None else norm.weight for norm in anatomy.norms_of(layer)]
    parts.out_norms += [norm.weight for norm in anatomy.out_norms_of(layer)]
    if attention.norms is None:
        parts.head_norms += [None, None]
    else:
        parts.head_norms += [getattr(attention, name).weight for name in attention.norms]
    parts.windows.append(rules.window or 0)
    parts.ropes.append(attention.rope_table)
