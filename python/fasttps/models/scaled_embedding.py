"""Gemma's ends: an embedding times sqrt(hidden_size), and a soft-cap on the logits.

Knows no family. A family makes its classes from these:
`class PackedGemma2TextScaledWordEmbedding(PackedScaledEmbedding, Gemma2TextScaledWordEmbedding)`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fasttps.models.decode_step import FusedCausalLM
from fasttps.models.packed_linear import PackedEmbedding


class PackedScaledEmbedding(PackedEmbedding):
    """Rows of the head's packed weight, scaled as the class that it replaces does."""

    embed_scale: Tensor

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.rows(input_ids) * self.embed_scale.to(self.weight.dtype)


class ScaledCausalLM(FusedCausalLM):
    """A causal LM of such an embedding, whose next tokens are one op."""

    config_keys = ("final_logit_softcapping",)

    def factors(self) -> dict[str, Any]:
        table: Any = self.decoder().embed_tokens
        scale = float(table.embed_scale.to(self.dtype))
        return {"embedding_scale": scale, "logits_softcap": self.config.final_logit_softcapping}
