"""transformers' Llama: what is replaced, and how its attention reaches the ops.

Imported when a model has Llama layers, so transformers is loaded already.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from fasttps.kv_cache import StaticKVCache
from fasttps.models import attention_interface
from fasttps.models.decode_step import FusedCausalLM, Layer, Parts, forward_of
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

    def forward_last(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: StaticKVCache,
        count: int,
    ) -> Tensor:
        """The output for the last `count` tokens; keys and values of all enter the cache."""
        heads = (-1, self.head_dim)
        out = attention_interface.attend_static(
            self.q_proj(hidden_states[:, -count:]).unflatten(-1, heads),
            self.k_proj(hidden_states).unflatten(-1, heads),
            self.v_proj(hidden_states).unflatten(-1, heads),
            cache.layers[self.layer_idx],
            *position_embeddings,
            attn_mask=None,
            scale=self.scaling,
            is_causal=True,
        )
        return self.o_proj(out.flatten(2))


class LlamaForCausalLM(FusedCausalLM, modeling_llama.LlamaForCausalLM):
    """A LlamaForCausalLM whose next tokens are one op.

    It has the name of what it replaces, which transformers writes into a saved config.
    """

    replaces = modeling_llama.LlamaForCausalLM
    own_attention = attention_interface.NAME
    output_class = CausalLMOutputWithPast
    forward = forward_of(modeling_llama.LlamaForCausalLM.forward)

    def decoder(self) -> Any:
        return self.model

    def prompt_logits(
        self, input_ids: Tensor, cache: Any, position_ids: Tensor, count: int
    ) -> Tensor:
        decoder: Any = self.model
        head: Any = self.lm_head
        x = decoder.embed_tokens(input_ids)
        rope = decoder.rotary_emb(x, position_ids=position_ids)
        *layers, last = decoder.layers
        for layer in layers:
            x = layer(
                x,
                position_ids=position_ids,
                use_cache=True,
                position_embeddings=rope,
                **{self.cache_name(): cache},
            )
        x, rows = x[:, -count:], last.input_layernorm(x)
        x = x + last.self_attn.forward_last(rows, rope, cache, count)
        x = x + last.mlp(last.post_attention_layernorm(x))
        return head(decoder.norm(x))

    def decoder_parts(self) -> Parts | str:
        decoder: Any = self.model
        config: Any = self.config
        if type(decoder) is not modeling_llama.LlamaModel:
            return f"its model is a {type(decoder).__name__}"
        if len(decoder.layers) != decoder.config.num_hidden_layers:
            return "not every layer of the config is there"
        layers = []
        for at, layer in enumerate(decoder.layers):
            if type(layer) is not modeling_llama.LlamaDecoderLayer:
                return f"layer {at} is a {type(layer).__name__}"
            attention, mlp = layer.self_attn, layer.mlp
            if type(attention) is not FusedLlamaAttention:
                return f"the attention of layer {at} is a {type(attention).__name__}"
            names = ("q_proj", "k_proj", "v_proj", "o_proj")
            linears: list[Any] = [getattr(attention, name) for name in names]
            kinds = (
                (layer.input_layernorm, modeling_llama.LlamaRMSNorm),
                (layer.post_attention_layernorm, modeling_llama.LlamaRMSNorm),
                (mlp, FusedLlamaMLP),
                *((linear, PackedLinear) for linear in linears),
            )
            for module, kind in kinds:
                if type(module) is not kind:
                    return f"layer {at} has a {type(module).__name__}, not a {kind.__name__}"
            if attention.layer_idx != at or not attention.is_causal:
                return f"the attention of layer {at} is not causal, or of another layer"
            layers.append(
                Layer(
                    (layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
                    (
                        *(linear.packed_weight for linear in linears),
                        mlp.packed_gate_up,
                        mlp.packed_down,
                    ),
                )
            )
        norm, head, table = decoder.norm, self.lm_head, decoder.embed_tokens
        if type(norm) is not modeling_llama.LlamaRMSNorm or type(head) is not PackedLinear:
            return f"the ends are a {type(norm).__name__} and a {type(head).__name__}"
        if head.bias is not None:
            return "lm_head has a bias"
        attentions = [layer.self_attn for layer in decoder.layers]
        eps = [norm.variance_epsilon, *(n.variance_epsilon for n in _norms(decoder.layers))]
        if len({a.scaling for a in attentions}) > 1 or len(set(eps)) > 1:
            return "layers differ in scaling or epsilon"
        return Parts(
            layers,
            norm.weight,
            table.packed_weight if type(table) is PackedEmbedding else None,
            head.packed_weight,
            head_dim=attentions[0].head_dim,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            norm_eps=norm.variance_epsilon,
            scale=attentions[0].scaling,
            activation=decoder.layers[0].mlp.function,
            settings=[
                (vars(decoder.config), "num_hidden_layers"),
                *((vars(n), "variance_epsilon") for n in (norm, *_norms(decoder.layers))),
                *((vars(a), name) for a in attentions for name in ("scaling", "is_causal")),
            ],
        )


def _norms(layers: Any) -> list[Any]:
    return [n for layer in layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]


# Here, not in the patch: a patched model that is loaded from a file brings this module alone.
attention_interface.register_attention()

FUSED: tuple[type[FusedModule], ...] = (LlamaForCausalLM, FusedLlamaMLP, FusedLlamaAttention)
LINEARS = (
    Linears(LlamaAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_llama.LlamaForCausalLM, "lm_head", ("lm_head",)),
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
