"""transformers' Mixtral: what is replaced; its experts are left alone."""

from __future__ import annotations

from transformers.models.mixtral.modeling_mixtral import (
    MixtralAttention,
    MixtralForCausalLM,
    MixtralSparseMoeBlock,
)

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.patch_plan import Linears


class FusedMixtralAttention(FusedAttention, MixtralAttention):
    """A MixtralAttention on our ops."""

    replaces = MixtralAttention

    @property
    def window(self) -> int | None:
        return self.config.sliding_window


LEFT_ALONE = {MixtralSparseMoeBlock: "experts are not fused"}
FUSED: tuple[type[FusedModule], ...] = (FusedMixtralAttention,)
LINEARS = (
    Linears(MixtralAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(MixtralForCausalLM, "lm_head", ("lm_head",)),
)
