"""transformers' GLM (ChatGLM3's architecture): what is replaced.

Its RoPE turns neighbours, in the first half of a head.
"""

from __future__ import annotations

from torch import Tensor
from transformers.models.glm.modeling_glm import GlmAttention, GlmForCausalLM, GlmMLP

from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.packed_module import Slot
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


FUSED: tuple[type[FusedModule], ...] = (FusedGlmMLP, FusedGlmAttention)
LINEARS = (
    Linears(GlmAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(GlmForCausalLM, "lm_head", ("lm_head",)),
)
