"""transformers' gpt-oss: what is replaced, whose softmax has a sink; its experts are left alone."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssAttention,
    GptOssForCausalLM,
    GptOssMLP,
)

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.patch_plan import Linears


class FusedGptOssAttention(FusedAttention, GptOssAttention):
    """A GptOssAttention on our ops."""

    replaces = GptOssAttention

    sinks: Tensor

    def rope(self, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """transformers gives each angle once."""
        cos, sin = (torch.cat((x, x), dim=-1) for x in position_embeddings)
        return cos, sin

    @property
    def sink_logits(self) -> Tensor:
        return self.sinks


LEFT_ALONE = {GptOssMLP: "experts are not fused"}
FUSED: tuple[type[FusedModule], ...] = (FusedGptOssAttention,)
LINEARS = (
    Linears(GptOssAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(GptOssForCausalLM, "lm_head", ("lm_head",)),
)
