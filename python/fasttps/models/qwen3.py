"""transformers' Qwen3: what is replaced, whose heads of q and k are normalised."""

from __future__ import annotations

from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from fasttps.models.decode_step import FusedCausalLM, forward_of
from fasttps.models.decoder_parts import Anatomy
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


class Qwen3ForCausalLM(FusedCausalLM, modeling_qwen3.Qwen3ForCausalLM):
    """A Qwen3ForCausalLM whose next tokens are one op."""

    replaces = modeling_qwen3.Qwen3ForCausalLM
    forward = forward_of(modeling_qwen3.Qwen3ForCausalLM.forward)
    anatomy = Anatomy(
        modeling_qwen3.Qwen3Model,
        modeling_qwen3.Qwen3DecoderLayer,
        modeling_qwen3.Qwen3RMSNorm,
        FusedQwen3Attention,
        FusedQwen3MLP,
    )


FUSED: tuple[type[FusedModule], ...] = (Qwen3ForCausalLM, FusedQwen3MLP, FusedQwen3Attention)
LINEARS = (
    Linears(Qwen3Attention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_qwen3.Qwen3ForCausalLM, "lm_head", ("lm_head",)),
)
