"""transformers' Qwen3-MoE: what is replaced; its experts are left alone."""

from __future__ import annotations

from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeForCausalLM,
    Qwen3MoeMLP,
    Qwen3MoeSparseMoeBlock,
)

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.patch_plan import Linears


class FusedQwen3MoeMLP(FusedGatedMLP, Qwen3MoeMLP):
    """A Qwen3MoeMLP over packed weights."""

    replaces = Qwen3MoeMLP


class FusedQwen3MoeAttention(FusedAttention, Qwen3MoeAttention):
    """A Qwen3MoeAttention on our ops."""

    replaces = Qwen3MoeAttention
    norms = ("q_norm", "k_norm")


LEFT_ALONE = {Qwen3MoeSparseMoeBlock: "experts are not fused"}
FUSED: tuple[type[FusedModule], ...] = (FusedQwen3MoeMLP, FusedQwen3MoeAttention)
LINEARS = (
    Linears(Qwen3MoeAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(Qwen3MoeForCausalLM, "lm_head", ("lm_head",)),
)
