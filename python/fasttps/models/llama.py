"""transformers' Llama: what is replaced, and how a token reaches the one op."""

from __future__ import annotations

from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from fasttps.models.decode_step import FusedCausalLM, forward_of
from fasttps.models.decoder_parts import Anatomy
from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.patch_plan import Linears


class FusedLlamaMLP(FusedGatedMLP, LlamaMLP):
    """A LlamaMLP over packed weights."""

    replaces = LlamaMLP


class FusedLlamaAttention(FusedAttention, LlamaAttention):
    """A LlamaAttention on our ops."""

    replaces = LlamaAttention


class LlamaForCausalLM(FusedCausalLM, modeling_llama.LlamaForCausalLM):
    """A LlamaForCausalLM whose next tokens are one op.

    It has the name of what it replaces, which transformers writes into a saved config.
    """

    replaces = modeling_llama.LlamaForCausalLM
    forward = forward_of(modeling_llama.LlamaForCausalLM.forward)
    anatomy = Anatomy(
        modeling_llama.LlamaModel,
        modeling_llama.LlamaDecoderLayer,
        modeling_llama.LlamaRMSNorm,
        FusedLlamaAttention,
        FusedLlamaMLP,
    )


FUSED: tuple[type[FusedModule], ...] = (LlamaForCausalLM, FusedLlamaMLP, FusedLlamaAttention)
LINEARS = (
    Linears(LlamaAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_llama.LlamaForCausalLM, "lm_head", ("lm_head",)),
)
