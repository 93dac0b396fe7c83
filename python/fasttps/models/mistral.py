"""transformers' Mistral: what is replaced, a Llama with a window in every layer."""

from __future__ import annotations

from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralForCausalLM,
    MistralMLP,
)

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.patch_plan import Linears


class FusedMistralMLP(FusedGatedMLP, MistralMLP):
    """A MistralMLP over packed weights."""

    replaces = MistralMLP


class FusedMistralAttention(FusedAttention, MistralAttention):
    """A MistralAttention on our ops."""

    replaces = MistralAttention

    @property
    def window(self) -> int | None:
        return self.config.sliding_window


FUSED: tuple[type[FusedModule], ...] = (FusedMistralMLP, FusedMistralAttention)
LINEARS = (
    Linears(MistralAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(MistralForCausalLM, "lm_head", ("lm_head",)),
)
