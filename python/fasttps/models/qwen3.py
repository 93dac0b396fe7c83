"""transformers' Qwen3: what is replaced, whose heads of q and k are normalised."""

from __future__ import annotations

from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3MLP

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.patch_plan import Linears


class FusedQwen3MLP(FusedGatedMLP, Qwen3MLP):
    """A Qwen3MLP over packed weights."""

    replaces = Qwen3MLP


class FusedQwen3Attention(FusedAttention, Qwen3Attention):
    """A Qwen3Attention on our ops."""

    replaces = Qwen3Attention
    norms = ("q_norm", "k_norm")


FUSED: tuple[type[FusedModule], ...] = (FusedQwen3MLP, FusedQwen3Attention)
LINEARS = (
    Linears(Qwen3Attention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(Qwen3ForCausalLM, "lm_head", ("lm_head",)),
)
