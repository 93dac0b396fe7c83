"""transformers' Llama: what is replaced, and how a token reaches the one op."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from fasttps.models import attention_interface
from fasttps.models.decode_step import FusedCausalLM, Layer, Parts, forward_of
from fasttps.models.fused_attention import FusedAttention
from fasttps.models.fused_module import FusedModule
from fasttps.models.gated_mlp import FusedGatedMLP
from fasttps.models.packed_linear import PackedEmbedding, PackedLinear
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


FUSED: tuple[type[FusedModule], ...] = (LlamaForCausalLM, FusedLlamaMLP, FusedLlamaAttention)
LINEARS = (
    Linears(LlamaAttention, "attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    Linears(modeling_llama.LlamaForCausalLM, "lm_head", ("lm_head",)),
)
