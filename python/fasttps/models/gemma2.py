"""transformers' Gemma 2: what is replaced, with a soft-cap on the scores."""

from __future__ import annotations

from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2MLP

from fasttps.models.decode_step import forward_of
from fasttps.models.decoder_parts import Anatomy
from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.patch_plan import Linears
from fasttps.models.scaled_embedding import PackedScaledEmbedding, ScaledCausalLM


class FusedGemma2MLP(FusedGatedMLP, Gemma2MLP):
    """A Gemma2MLP over packed weights."""

    replaces = Gemma2MLP


class FusedGemma2Attention(FusedAttention, Gemma2Attention):
    """A Gemma2Attention on our ops."""

    replaces = Gemma2Attention

    attn_logit_softcapping: float | None

    @property
    def softcap(self) -> float | None:
        return self.attn_logit_softcapping


class Gemma2ForCausalLM(ScaledCausalLM, modeling_gemma2.Gemma2ForCausalLM):
    """A Gemma2ForCausalLM whose next tokens are one op."""

    replaces = modeling_gemma2.Gemma2ForCausalLM
    forward = forward_of(modeling_gemma2.Gemma2ForCausalLM.forward)
    anatomy = Anatomy(
        modeling_gemma2.Gemma2Model,
        modeling_gemma2.Gemma2DecoderLayer,
        modeling_gemma2.Gemma2RMSNorm,
        FusedGemma2Attention,
        FusedGemma2MLP,
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        out_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        norm_offset=1.0,
        norm_eps="eps",
    )


FUSED: tuple[type[FusedModule], ...] = (FusedGemma2MLP, FusedGemma2Attention)
LINEARS = (
    Linears(Gemma2Attention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_gemma2.Gemma2ForCausalLM, "lm_head", ("lm_head",)),
)
EMBEDDINGS: tuple[type[PackedScaledEmbedding], ...] = ()

# Before transformers 5 the model scales what the embedding gives, in its own forward.
if hasattr(modeling_gemma2, "Gemma2TextScaledWordEmbedding"):

    class PackedGemma2TextScaledWordEmbedding(
        PackedScaledEmbedding, modeling_gemma2.Gemma2TextScaledWordEmbedding
    ):
        """A Gemma2TextScaledWordEmbedding that reads the head's packed weight."""

        replaces = modeling_gemma2.Gemma2TextScaledWordEmbedding

    FUSED = (Gemma2ForCausalLM, *FUSED)
    EMBEDDINGS = (PackedGemma2TextScaledWordEmbedding,)
