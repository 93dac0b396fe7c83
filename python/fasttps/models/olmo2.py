"""transformers' OLMo 2: what is replaced, whose q and k are normalised over all heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2MLP

from fasttps.models.decode_step import FusedCausalLM, forward_of
from fasttps.models.decoder_parts import Anatomy
from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.patch_plan import Linears


class FusedOlmo2MLP(FusedGatedMLP, Olmo2MLP):
    """A Olmo2MLP over packed weights."""

    replaces = Olmo2MLP


class FusedOlmo2Attention(FusedAttention, Olmo2Attention):
    """A Olmo2Attention on our ops."""

    replaces = Olmo2Attention
    norms = ("q_norm", "k_norm")

    q_norm: Any
    k_norm: Any

    def normalize(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Over all heads at once."""
        heads = (-1, self.head_dim)
        return (
            self.q_norm(query.flatten(2)).unflatten(-1, heads),
            self.k_norm(key.flatten(2)).unflatten(-1, heads),
        )


class Olmo2ForCausalLM(FusedCausalLM, modeling_olmo2.Olmo2ForCausalLM):
    """A Olmo2ForCausalLM whose next tokens are one op."""

    replaces = modeling_olmo2.Olmo2ForCausalLM
    forward = forward_of(modeling_olmo2.Olmo2ForCausalLM.forward)
    anatomy = Anatomy(
        modeling_olmo2.Olmo2Model,
        modeling_olmo2.Olmo2DecoderLayer,
        modeling_olmo2.Olmo2RMSNorm,
        FusedOlmo2Attention,
        FusedOlmo2MLP,
        norms=(None, None),
        out_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    )


FUSED: tuple[type[FusedModule], ...] = (Olmo2ForCausalLM, FusedOlmo2MLP, FusedOlmo2Attention)
LINEARS = (
    Linears(Olmo2Attention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_olmo2.Olmo2ForCausalLM, "lm_head", ("lm_head",)),
)
