"""transformers' Mistral: what is replaced, a Llama with a window in every layer."""

from __future__ import annotations

from transformers.models.mistral import modeling_mistral
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralMLP,
)

from fasttps.models.decode_step import FusedCausalLM, forward_of
from fasttps.models.decoder_parts import Anatomy
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


class MistralForCausalLM(FusedCausalLM, modeling_mistral.MistralForCausalLM):
    """A MistralForCausalLM whose next tokens are one op."""

    replaces = modeling_mistral.MistralForCausalLM
    forward = forward_of(modeling_mistral.MistralForCausalLM.forward)
    anatomy = Anatomy(
        modeling_mistral.MistralModel,
        modeling_mistral.MistralDecoderLayer,
        modeling_mistral.MistralRMSNorm,
        FusedMistralAttention,
        FusedMistralMLP,
    )


FUSED: tuple[type[FusedModule], ...] = (MistralForCausalLM, FusedMistralMLP, FusedMistralAttention)
LINEARS = (
    Linears(MistralAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_mistral.MistralForCausalLM, "lm_head", ("lm_head",)),
)
