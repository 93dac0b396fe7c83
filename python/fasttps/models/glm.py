"""transformers' GLM (ChatGLM3's architecture): what is replaced.

Its RoPE turns neighbours, in the first half of a head.
"""

from __future__ import annotations

from torch import Tensor
from transformers.models.glm import modeling_glm
from transformers.models.glm.modeling_glm import GlmAttention, GlmMLP

from fasttps.models.decode_step import FusedCausalLM, forward_of
from fasttps.models.decoder_parts import Anatomy
from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.packed_weight import Slot
from fasttps.models.patch_plan import Linears


class FusedGlmMLP(FusedGatedMLP, GlmMLP):
    """A GlmMLP over packed weights."""

    replaces = GlmMLP
    slots = (
        Slot("gate_up_packed", ("gate_up_proj",), halves=True),
        Slot("down_packed", ("down_proj",)),
    )
    activation = "activation_fn"


class FusedGlmAttention(FusedAttention, GlmAttention):
    """A GlmAttention on our ops."""

    replaces = GlmAttention
    interleaved = True

    def rope(self, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """transformers gives the angles of halves; here both of a pair stand side by side."""
        cos, sin = (x.chunk(2, dim=-1)[0].repeat_interleave(2, -1) for x in position_embeddings)
        return cos, sin


class GlmForCausalLM(FusedCausalLM, modeling_glm.GlmForCausalLM):
    """A GlmForCausalLM whose next tokens are one op."""

    replaces = modeling_glm.GlmForCausalLM
    forward = forward_of(modeling_glm.GlmForCausalLM.forward)
    anatomy = Anatomy(
        modeling_glm.GlmModel,
        modeling_glm.GlmDecoderLayer,
        modeling_glm.GlmRMSNorm,
        FusedGlmAttention,
        FusedGlmMLP,
    )


FUSED: tuple[type[FusedModule], ...] = (GlmForCausalLM, FusedGlmMLP, FusedGlmAttention)
LINEARS = (
    Linears(GlmAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_glm.GlmForCausalLM, "lm_head", ("lm_head",)),
)
