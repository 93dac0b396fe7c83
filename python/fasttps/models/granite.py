"""transformers' Granite: what is replaced, a Llama with other scales."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.granite import modeling_granite
from transformers.models.granite.modeling_granite import (
    GraniteAttention,
    GraniteMLP,
)

from fasttps.models.decode_step import FusedCausalLM, forward_of
from fasttps.models.decoder_parts import Anatomy
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


class GraniteForCausalLM(FusedCausalLM, modeling_granite.GraniteForCausalLM):
    """A GraniteForCausalLM whose next tokens are one op."""

    replaces = modeling_granite.GraniteForCausalLM
    forward = forward_of(modeling_granite.GraniteForCausalLM.forward)
    anatomy = Anatomy(
        modeling_granite.GraniteModel,
        modeling_granite.GraniteDecoderLayer,
        modeling_granite.GraniteRMSNorm,
        FusedGraniteAttention,
        FusedGraniteMLP,
    )
    config_keys = ("residual_multiplier", "embedding_multiplier", "logits_scaling")

    def embed(self, input_ids: Tensor) -> Tensor:
        decoder = self.decoder()
        return decoder.embed_tokens(input_ids) * decoder.embedding_multiplier

    def factors(self) -> dict[str, Any]:
        return {
            "residual_scale": self.config.residual_multiplier,
            "embedding_scale": self.config.embedding_multiplier,
            "logits_scale": 1 / self.config.logits_scaling,
        }


FUSED: tuple[type[FusedModule], ...] = (GraniteForCausalLM, FusedGraniteMLP, FusedGraniteAttention)
LINEARS = (
    Linears(GraniteAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_granite.GraniteForCausalLM, "lm_head", ("lm_head",)),
)
