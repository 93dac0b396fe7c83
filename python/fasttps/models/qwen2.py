"""transformers' Qwen2 and Qwen2.5: what is replaced, a Llama with biases and some windows."""

from __future__ import annotations

from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2ForCausalLM, Qwen2MLP

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.patch_plan import Linears


class FusedQwen2MLP(FusedGatedMLP, Qwen2MLP):
    """A Qwen2MLP over packed weights."""

    replaces = Qwen2MLP


class FusedQwen2Attention(FusedAttention, Qwen2Attention):
    """A Qwen2Attention on our ops."""

    replaces = Qwen2Attention


FUSED: tuple[type[FusedModule], ...] = (FusedQwen2MLP, FusedQwen2Attention)
LINEARS = (
    Linears(Qwen2Attention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(Qwen2ForCausalLM, "lm_head", ("lm_head",)),
)
