"""transformers' LFM2: what is replaced; its convolutions are left alone."""

from __future__ import annotations

from transformers.models.lfm2.modeling_lfm2 import Lfm2Attention, Lfm2ForCausalLM, Lfm2MLP

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.packed_weight import Slot
from fasttps.models.patch_plan import Linears


class FusedLfm2MLP(FusedGatedMLP, Lfm2MLP):
    """A Lfm2MLP over packed weights."""

    replaces = Lfm2MLP
    slots = (Slot("gate_up_packed", ("w1", "w3")), Slot("down_packed", ("w2",)))
    activation = None


class FusedLfm2Attention(FusedAttention, Lfm2Attention):
    """A Lfm2Attention on our ops."""

    replaces = Lfm2Attention
    output = "out_proj"
    norms = ("q_layernorm", "k_layernorm")


FUSED: tuple[type[FusedModule], ...] = (FusedLfm2MLP, FusedLfm2Attention)
LINEARS = (
    Linears(Lfm2Attention, "attention", ("q_proj", "k_proj", "v_proj", "out_proj")),
    Linears(Lfm2ForCausalLM, "lm_head", ("lm_head",)),
)
