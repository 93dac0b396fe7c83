"""transformers' Gemma 3: what is replaced, whose heads of q and k are normalised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3Attention,
    Gemma3MLP,
    Gemma3TextScaledWordEmbedding,
)

from fasttps.models.decode_step import forward_of
from fasttps.models.decoder_parts import Anatomy
from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.patch_plan import Linears
from fasttps.models.scaled_embedding import PackedScaledEmbedding, ScaledCausalLM


class FusedGemma3MLP(FusedGatedMLP, Gemma3MLP):
    """A Gemma3MLP over packed weights."""

    replaces = Gemma3MLP


class FusedGemma3Attention(FusedAttention, Gemma3Attention):
    """A Gemma3Attention on our ops."""

    replaces = Gemma3Attention
    norms = ("q_norm", "k_norm")

    @property
    def rope_table(self) -> int:
        """Sliding layers have angles of their own."""
        return 1 if self.is_sliding else 0


class PackedGemma3TextScaledWordEmbedding(PackedScaledEmbedding, Gemma3TextScaledWordEmbedding):
    """A Gemma3TextScaledWordEmbedding that reads the head's packed weight."""

    replaces = Gemma3TextScaledWordEmbedding


class Gemma3ForCausalLM(ScaledCausalLM, modeling_gemma3.Gemma3ForCausalLM):
    """A Gemma3ForCausalLM whose next tokens are one op."""

    replaces = modeling_gemma3.Gemma3ForCausalLM
    forward = forward_of(modeling_gemma3.Gemma3ForCausalLM.forward)
    anatomy = Anatomy(
        modeling_gemma3.Gemma3TextModel,
        modeling_gemma3.Gemma3DecoderLayer,
        modeling_gemma3.Gemma3RMSNorm,
        FusedGemma3Attention,
        FusedGemma3MLP,
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        out_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        norm_offset=1.0,
        norm_eps="eps",
    )

    def rotaries(self) -> Sequence[Any]:
        decoder: Any = self.model
        local = getattr(decoder, "rotary_emb_local", None)  # before transformers 5
        return (decoder.rotary_emb,) if local is None else (decoder.rotary_emb, local)

    def angles(self, x: Tensor, position_ids: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        full, *local = self.rotaries()
        if local:
            return full(x, position_ids), local[0](x, position_ids)
        kinds = ("full_attention", "sliding_attention")
        have = self.config.layer_types
        return [full(x, position_ids, kind if kind in have else have[0]) for kind in kinds]


FUSED: tuple[type[FusedModule], ...] = (Gemma3ForCausalLM, FusedGemma3MLP, FusedGemma3Attention)
LINEARS = (
    Linears(Gemma3Attention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_gemma3.Gemma3ForCausalLM, "lm_head", ("lm_head",)),
)
EMBEDDINGS = (PackedGemma3TextScaledWordEmbedding,)
