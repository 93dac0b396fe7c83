"""transformers' Phi-3: what is replaced, whose q, k and v are one linear, as are gate and up."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3ForCausalLM, Phi3MLP

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.packed_module import Slot
from fasttps.models.patch_plan import Linears


class FusedPhi3MLP(FusedGatedMLP, Phi3MLP):
    """A Phi3MLP over packed weights."""

    replaces = Phi3MLP
    slots = (
        Slot("gate_up_packed", ("gate_up_proj",), halves=True),
        Slot("down_packed", ("down_proj",)),
    )
    activation = "activation_fn"


class FusedPhi3Attention(FusedAttention, Phi3Attention):
    """A Phi3Attention on our ops."""

    replaces = Phi3Attention
    inputs = ("qkv_proj",)

    qkv_proj: Any
    num_key_value_heads: int

    @property
    def window(self) -> int | None:
        return self.config.sliding_window

    def project(self, x: Tensor, last: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        num_kv_heads = self.num_key_value_heads
        num_heads = qkv.size(2) - 2 * num_kv_heads
        query, key, value = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
        return (query if last is None else query[:, -last:]), key, value


FUSED: tuple[type[FusedModule], ...] = (FusedPhi3MLP, FusedPhi3Attention)
LINEARS = (
    Linears(Phi3Attention, "attention", ("qkv_proj", "o_proj")),
    Linears(Phi3ForCausalLM, "lm_head", ("lm_head",)),
)
