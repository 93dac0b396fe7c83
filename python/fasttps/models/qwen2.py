"""transformers' Qwen2 and Qwen2.5: what is replaced, a Llama with biases and some windows."""

from __future__ import annotations

from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2MLP

from fasttps.models.decode_step import FusedCausalLM, forward_of
from fasttps.models.decoder_parts import Anatomy
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


class Qwen2ForCausalLM(FusedCausalLM, modeling_qwen2.Qwen2ForCausalLM):
    """A Qwen2ForCausalLM whose next tokens are one op."""

    replaces = modeling_qwen2.Qwen2ForCausalLM
    forward = forward_of(modeling_qwen2.Qwen2ForCausalLM.forward)
    anatomy = Anatomy(
        modeling_qwen2.Qwen2Model,
        modeling_qwen2.Qwen2DecoderLayer,
        modeling_qwen2.Qwen2RMSNorm,
        FusedQwen2Attention,
        FusedQwen2MLP,
    )


FUSED: tuple[type[FusedModule], ...] = (Qwen2ForCausalLM, FusedQwen2MLP, FusedQwen2Attention)
LINEARS = (
    Linears(Qwen2Attention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_qwen2.Qwen2ForCausalLM, "lm_head", ("lm_head",)),
)
