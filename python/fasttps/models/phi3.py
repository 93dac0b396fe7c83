"""transformers' Phi-3: what is replaced, whose q, k and v are one linear, as are gate and up."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.models.phi3 import modeling_phi3
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3MLP

from fasttps.kv_cache import StaticKVCache
from fasttps.models import transformers_adapter
from fasttps.models.decode_step import FusedCausalLM, forward_of
from fasttps.models.decoder_parts import Anatomy
from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.packed_weight import PackedTensor, Slot
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

    def packed_projections(self) -> tuple[PackedTensor, ...] | str:
        """q, k and v as panels of the one matrix, where each begins with one."""
        found = super().packed_projections()
        if isinstance(found, str):
            return found
        qkv, o = found
        kv_rows = self.num_key_value_heads * self.head_dim
        parts, first = [], 0
        for rows in (qkv.rows - 2 * kv_rows, kv_rows, kv_rows):
            part = qkv.slice(first, rows)
            if isinstance(part, str):
                return f"qkv_proj: {part}"
            parts.append(part)
            first += rows
        return (*parts, o)


class Phi3ForCausalLM(FusedCausalLM, modeling_phi3.Phi3ForCausalLM):
    """A Phi3ForCausalLM whose next tokens are one op."""

    replaces = modeling_phi3.Phi3ForCausalLM
    forward = forward_of(modeling_phi3.Phi3ForCausalLM.forward)
    anatomy = Anatomy(
        modeling_phi3.Phi3Model,
        modeling_phi3.Phi3DecoderLayer,
        modeling_phi3.Phi3RMSNorm,
        FusedPhi3Attention,
        FusedPhi3MLP,
    )

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """Past the length at which longrope changes, the keys of all tokens are made anew.

        In our cache; transformers would go on in one of its own, and kept the old keys in 4.57.
        """
        cache = kwargs.get(self.cache_name())
        limit = getattr(self.config, "original_max_position_embeddings", None)
        if (
            isinstance(cache, StaticKVCache)
            and limit is not None
            and input_ids.size(1) > limit
            and transformers_adapter.slices_by_length(GenerationMixin)
        ):
            if int(cache.get_seq_length()) <= limit:
                cache.reset()
                kwargs["next_sequence_length"] = None
            return GenerationMixin.prepare_inputs_for_generation(self, input_ids, **kwargs)
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


FUSED: tuple[type[FusedModule], ...] = (Phi3ForCausalLM, FusedPhi3MLP, FusedPhi3Attention)
LINEARS = (
    Linears(Phi3Attention, "attention", ("qkv_proj", "o_proj")),
    Linears(modeling_phi3.Phi3ForCausalLM, "lm_head", ("lm_head",)),
)
