"""transformers' Granite: what is replaced, a Llama with other scales."""

from __future__ import annotations

from transformers.models.granite.modeling_granite import (
    GraniteAttention,
    GraniteForCausalLM,
    GraniteMLP,
)

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.patch_plan import Linears


class FusedGraniteMLP(FusedGatedMLP, GraniteMLP):
    """A GraniteMLP over packed weights."""

    replaces = GraniteMLP


class FusedGraniteAttention(FusedAttention, GraniteAttention):
    """A GraniteAttention on our ops."""

    replaces = GraniteAttention


FUSED: tuple[type[FusedModule], ...] = (FusedGraniteMLP, FusedGraniteAttention)
LINEARS = (
    Linears(GraniteAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(GraniteForCausalLM, "lm_head", ("lm_head",)),
)
