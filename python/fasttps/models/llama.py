"""transformers' Llama: what is replaced, and how its attention reaches the ops.

Imported when a model has Llama layers, so transformers is loaded already.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaMLP

from fasttps.kv_cache import StaticKVCache
from fasttps.models import attention_interface
from fasttps.models.fused_module import FusedModule, ReadOriginal
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.obstacles import has_kernels
from fasttps.models.packed_linear import PackedEmbedding, PackedLinear
from fasttps.models.patch_options import Options
from fasttps.models.patch_plan import Linears, Step

# What a caller may pass down to the attention that the one op does not serve.
_LONG_WAY = frozenset({"output_attentions", "position_bias", "softcap", "s_aux", "sliding_window"})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FusedLlamaMLP(FusedGatedMLP, LlamaMLP):
    """A LlamaMLP over packed weights."""

    replaces = LlamaMLP


class FusedLlamaAttention(FusedModule, LlamaAttention):
    """A LlamaAttention; with a StaticKVCache, all between its projections is one op.

    The projections stay modules, each packed by itself, so whatever wraps them keeps working.
    """

    replaces = LlamaAttention
    part = "attention"
    op = "rope_attention_decode, causal_prefill"

    # Of LlamaAttention, what is used here:
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    is_causal: bool
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module

    @classmethod
    def obstacle(cls, module: nn.Module, shared: frozenset[int]) -> str | None:
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                return f"{name} is on the meta device (offloaded)"
            if not has_kernels(parameter.device):
                return f"{name} is on {parameter.device}, for which there are no kernels"
            if parameter.is_floating_point() and parameter.dtype not in _DTYPES:
                return f"{name} is {parameter.dtype}, which the ops do not take"
        return None

    def fuse(self, options: Options, **arguments: Any) -> None:
        self.__dict__["kv"] = options.kv

    def unfuse(self, read: ReadOriginal | None = None) -> None:
        del self.__dict__["kv"]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,  # the name of `cache` before transformers 5.24
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        self.refuse_gradient(hidden_states, self.q_proj._parameters.get("weight"))
        if cache is None:
            cache = past_key_values
        if (
            not isinstance(cache, StaticKVCache)
            or position_embeddings is None
            or any(
                kwargs[name] is not None and kwargs[name] is not False
                for name in _LONG_WAY & kwargs.keys()
            )
            or self.config._attn_implementation != attention_interface.NAME
            or self.config.output_attentions
        ):
            # The class's own way, with the attention that its config names: ours, unless the user
            # has set another. The cache goes by position, its name differs between versions.
            return super().forward(
                hidden_states, position_embeddings, attention_mask, cache, **kwargs
            )
        batch, new_tokens = hidden_states.shape[:-1]
        heads = (batch, new_tokens, -1, self.head_dim)
        is_causal = kwargs.get("is_causal")
        out = attention_interface.attend_static(
            self.q_proj(hidden_states).view(heads),
            self.k_proj(hidden_states).view(heads),
            self.v_proj(hidden_states).view(heads),
            cache.layers[self.layer_idx],
            *position_embeddings,
            attn_mask=attention_mask,
            scale=self.scaling,
            is_causal=self.is_causal if is_causal is None else is_causal,
        )
        return self.o_proj(out.view(batch, new_tokens, -1)), None


# Here, not in the patch: a patched model that is loaded from a file brings this module alone.
attention_interface.register_attention()

FUSED: tuple[type[FusedModule], ...] = (FusedLlamaMLP, FusedLlamaAttention)
LINEARS = (
    Linears(LlamaAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(LlamaForCausalLM, "lm_head", ("lm_head",)),
)


def change_model(model: nn.Module, steps: Sequence[Step], changes: ExitStack) -> None:
    """What is not of one module.

    The configs through which the fused attentions ask for their mask and attention, and what
    would make other embeddings out of empty Parameters.
    """
    attentions = [step.module for step in steps if step.fused is FusedLlamaAttention]
    attention_interface.choose_attention(model, attentions, changes)
    packed = {step.name for step in steps if step.fused in (PackedLinear, PackedEmbedding)}
    for name, module in model.named_modules():
        if not hasattr(module, "resize_token_embeddings"):
            continue
        prefix = f"{name}." if name else ""
        if packed & {f"{prefix}{own}" for own in ("lm_head", "embed_tokens", "model.embed_tokens")}:
            module.__dict__["resize_token_embeddings"] = resize_token_embeddings
            changes.callback(module.__dict__.pop, "resize_token_embeddings")


def resize_token_embeddings(*args: Any, **kwargs: Any) -> NoReturn:
    """In the place of the model's own method, which would take the weights to be empty.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "resize_token_embeddings: the weights of lm_head are packed; undo the patch first, or "
        "patch with lm_head=False"
    )
