"""transformers' SmolLM3: what is replaced, of which some layers do not rotate."""

from __future__ import annotations

from torch import Tensor
from transformers.models.smollm3 import modeling_smollm3
from transformers.models.smollm3.modeling_smollm3 import (
    SmolLM3Attention,
    SmolLM3MLP,
)

from fasttps.models.decode_step import FusedCausalLM, forward_of
from fasttps.models.decoder_parts import Anatomy
from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.patch_plan import Linears


class FusedSmolLM3MLP(FusedGatedMLP, SmolLM3MLP):
    """A SmolLM3MLP over packed weights."""

    replaces = SmolLM3MLP


class FusedSmolLM3Attention(FusedAttention, SmolLM3Attention):
    """A SmolLM3Attention on our ops."""

    replaces = SmolLM3Attention

    def rope(self, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        return position_embeddings if self.use_rope else None

    @property
    def rope_table(self) -> int:
        return 0 if self.use_rope else -1


class SmolLM3ForCausalLM(FusedCausalLM, modeling_smollm3.SmolLM3ForCausalLM):
    """A SmolLM3ForCausalLM whose next tokens are one op."""

    replaces = modeling_smollm3.SmolLM3ForCausalLM
    forward = forward_of(modeling_smollm3.SmolLM3ForCausalLM.forward)
    anatomy = Anatomy(
        modeling_smollm3.SmolLM3Model,
        modeling_smollm3.SmolLM3DecoderLayer,
        modeling_smollm3.SmolLM3RMSNorm,
        FusedSmolLM3Attention,
        FusedSmolLM3MLP,
    )


FUSED: tuple[type[FusedModule], ...] = (SmolLM3ForCausalLM, FusedSmolLM3MLP, FusedSmolLM3Attention)
LINEARS = (
    Linears(SmolLM3Attention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_smollm3.SmolLM3ForCausalLM, "lm_head", ("lm_head",)),
)
