"""transformers' Gemma 3: what is replaced, whose heads of q and k are normalised."""

from __future__ import annotations

from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3Attention,
    Gemma3ForCausalLM,
    Gemma3MLP,
    Gemma3TextScaledWordEmbedding,
)

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.packed_linear import PackedEmbedding
from fasttps.models.patch_plan import Linears


class FusedGemma3MLP(FusedGatedMLP, Gemma3MLP):
    """A Gemma3MLP over packed weights."""

    replaces = Gemma3MLP


class FusedGemma3Attention(FusedAttention, Gemma3Attention):
    """A Gemma3Attention on our ops."""

    replaces = Gemma3Attention
    norms = ("q_norm", "k_norm")


class PackedGemma3TextScaledWordEmbedding(PackedEmbedding, Gemma3TextScaledWordEmbedding):
    """Rows of the head's packed weight, scaled by sqrt(hidden_size)."""

    replaces = Gemma3TextScaledWordEmbedding

    embed_scale: Tensor

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.rows(input_ids) * self.embed_scale.to(self.weight.dtype)


FUSED: tuple[type[FusedModule], ...] = (FusedGemma3MLP, FusedGemma3Attention)
LINEARS = (
    Linears(Gemma3Attention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(Gemma3ForCausalLM, "lm_head", ("lm_head",)),
)
EMBEDDINGS = (PackedGemma3TextScaledWordEmbedding,)
