"""transformers' StarCoder2: what is replaced.

Its MLP has no gate, so its two linears are packed by themselves.
"""

from __future__ import annotations

from transformers.models.starcoder2.modeling_starcoder2 import (
    Starcoder2Attention,
    Starcoder2ForCausalLM,
    Starcoder2MLP,
)

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.patch_plan import Linears


class FusedStarcoder2Attention(FusedAttention, Starcoder2Attention):
    """A Starcoder2Attention on our ops."""

    replaces = Starcoder2Attention

    @property
    def window(self) -> int | None:
        return self.config.sliding_window


FUSED: tuple[type[FusedModule], ...] = (FusedStarcoder2Attention,)
LINEARS = (
    Linears(Starcoder2Attention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(Starcoder2MLP, "mlp", ("c_fc", "c_proj")),
    Linears(Starcoder2ForCausalLM, "lm_head", ("lm_head",)),
)
