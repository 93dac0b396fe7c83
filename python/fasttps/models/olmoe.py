"""transformers' OLMoE: what is replaced; its experts are left alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.olmoe.modeling_olmoe import (
    OlmoeAttention,
    OlmoeForCausalLM,
    OlmoeSparseMoeBlock,
)

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.patch_plan import Linears


class FusedOlmoeAttention(FusedAttention, OlmoeAttention):
    """A OlmoeAttention on our ops."""

    replaces = OlmoeAttention
    norms = ("q_norm", "k_norm")

    q_norm: Any
    k_norm: Any

    def project(self, x: Tensor, last: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(x, last)
        if (limit := self.config.clip_qkv) is None:
            return query, key, value
        return query.clamp(-limit, limit), key.clamp(-limit, limit), value.clamp(-limit, limit)

    def normalize(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Over all heads at once."""
        heads = (-1, self.head_dim)
        return (
            self.q_norm(query.flatten(2)).unflatten(-1, heads),
            self.k_norm(key.flatten(2)).unflatten(-1, heads),
        )


LEFT_ALONE = {OlmoeSparseMoeBlock: "experts are not fused"}
FUSED: tuple[type[FusedModule], ...] = (FusedOlmoeAttention,)
LINEARS = (
    Linears(OlmoeAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(OlmoeForCausalLM, "lm_head", ("lm_head",)),
)
