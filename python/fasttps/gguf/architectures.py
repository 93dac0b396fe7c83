"""What sets llama.cpp's architectures apart: names of the tensors, rows, values, config.

After llama.cpp's converter (conversion/*.py) and its loaders (src/models/*.cpp).
A new architecture is a row of ARCHITECTURES and, where its config has more, a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fasttps.gguf.header import BrokenGguf, UnsupportedGguf
from fasttps.gguf.keys import Keys


@dataclass
class Draft:
    """A config in the making: `values` are the arguments of the class that `model` has."""

    model: str
    values: dict[str, Any]

    def sliding(self, layers: int, read: Keys, pattern: int) -> None:
        """Layers with a window, all but each last of `pattern`, unless the file says which."""
        key = "attention.sliding_window_pattern"
        stated = read.per_layer(key, layers) if key in read else None
        if stated is not None and len(set(stated)) == 1 and stated[0] > 1:
            pattern, stated = stated[0], None
        if stated is None:
            stated = [int((layer + 1) % pattern != 0) for layer in range(layers)]
        kinds = ("full_attention", "sliding_attention")
        self.values["layer_types"] = [kinds[bool(one)] for one in stated]


# Completes the draft of a file; what it takes out of the values is not in the config.
Complete = Callable[[Draft, Keys], None]


@dataclass(frozen=True)
class Architecture:
    """How a file of an architecture becomes a model of transformers.

    Attributes:
        model: the class of transformers.
        layer, top: llama.cpp's names of modules, of a layer and of the model, to transformers'.
        paired_rows: the rows of a head of queries or keys lie as RoPE's pairs [head_dim / 2, 2]
            in the file, and as [2, head_dim / 2] in transformers. Else both have the same order.
        norms_plus_one: the file has the norms' factors, transformers what they are above 1.
        complete: the rest of the config.
    """

    model: str
    layer: Mapping[str, str]
    top: Mapping[str, str]
    paired_rows: bool = False
    norms_plus_one: bool = False
    complete: Complete = field(default=lambda draft, read: None)


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GATE_UP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_AROUND = {**_AFTER, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_LLAMA = {**_BEFORE, **_ATTENTION, **_MLP}


def _llama(draft: Draft, read: Keys) -> None:
    """Of a Mistral it is told by the window that it states, if it does."""
    if window := read.optional_count("attention.sliding_window"):
        draft.model = "MistralForCausalLM"
        draft.values["sliding_window"] = window
        if any(draft.values.pop(key) for key in ("attention_bias", "mlp_bias")):
            raise UnsupportedGguf("has biases and a sliding window")


def _mistral3(draft: Draft, read: Keys) -> None:
    """Mistral's later files; Ministral 3 scales the queries past the original context."""
    draft.values["sliding_window"] = read.optional_count("attention.sliding_window")
    if scale := read.number("attention.temperature_scale", 0.0):
        draft.model = "Ministral3ForCausalLM"
        draft.values["rope_parameters"]["llama_4_scaling_beta"] = scale
        if draft.values["rope_parameters"]["rope_type"] != "yarn":
            raise UnsupportedGguf("has attention.temperature_scale without YaRN")


def _phi3(draft: Draft, read: Keys) -> None:
    values = draft.values
    rope = values["rope_parameters"]
    original = rope.get("original_max_position_embeddings", values["max_position_embeddings"])
    values["original_max_position_embeddings"] = original
    values["sliding_window"] = read.optional_count("attention.sliding_window")


def _gemma2(draft: Draft, read: Keys) -> None:
    values = draft.values
    values["attn_logit_softcapping"] = read.positive("attn_logit_softcapping", 50.0)
    values["final_logit_softcapping"] = read.positive("final_logit_softcapping", 30.0)
    values["sliding_window"] = read.count("attention.sliding_window", 4096)
    draft.sliding(values["num_hidden_layers"], read, 2)
    _scale_of_gemma(values, layers_of_27b=46)


def _gemma3(draft: Draft, read: Keys) -> None:
    values = draft.values
    cap = read.number("final_logit_softcapping", 0.0)
    values["final_logit_softcapping"] = cap or None
    window = read.optional_count("attention.sliding_window")
    if window is None:
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    else:
        values["sliding_window"] = window
        draft.sliding(values["num_hidden_layers"], read, 6)
    local = {"rope_type": "default", "rope_theta": read.positive("rope.freq_base_swa", 10000.0)}
    full = values["rope_parameters"]
    values["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    _scale_of_gemma(values, layers_of_27b=62)


def _scale_of_gemma(values: dict[str, Any], layers_of_27b: int) -> None:
    """Scores are scaled by the root of a number that the file does not state."""
    width = values["head_dim"]
    if values["num_hidden_layers"] == layers_of_27b:
        width = values["hidden_size"] // values["num_attention_heads"]
    values["query_pre_attn_scalar"] = width


def _glm(draft: Draft, read: Keys) -> None:
    read.refuse("nextn_predict_layers", "rope.dimension_sections")


def _granite(draft: Draft, read: Keys) -> None:
    values = draft.values
    scale = read.number("attention.scale", 0.0) or values["head_dim"] ** -0.5
    values["attention_multiplier"] = scale
    values["embedding_multiplier"] = read.number("embedding_scale", 1.0)
    values["residual_multiplier"] = read.number("residual_scale", 1.0)
    values["logits_scaling"] = read.positive("logit_scale")
    if not read.get("rope.scaling.finetuned", True):
        raise UnsupportedGguf("has no RoPE")


def _olmo2(draft: Draft, read: Keys) -> None:
    """OLMo 3 is OLMo 2 with windows, and its RoPE is scaled in the layers without one."""
    values = draft.values
    window = read.optional_count("attention.sliding_window")
    if window is None:
        return
    draft.model = "Olmo3ForCausalLM"
    values["sliding_window"] = window
    draft.sliding(values["num_hidden_layers"], read, 4)
    full = values["rope_parameters"]
    theta = read.positive("rope.freq_base_swa", full["rope_theta"])
    local = {"rope_type": "default", "rope_theta": theta}
    values["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


def _smollm3(draft: Draft, read: Keys) -> None:
    draft.values["no_rope_layer_interval"] = 4  # llama.cpp's, which no file states


def _starcoder2(draft: Draft, read: Keys) -> None:
    values = draft.values
    values["use_bias"] = values.pop("attention_bias")
    values["norm_epsilon"] = values.pop("rms_norm_eps")
    values["sliding_window"] = read.optional_count("attention.sliding_window")


def _lfm2(draft: Draft, read: Keys) -> None:
    values = draft.values
    read.refuse("attention.sliding_window")
    layers = values["num_hidden_layers"]
    heads = read.per_layer("attention.head_count_kv", layers)
    if len(set(heads) - {0}) != 1:
        raise UnsupportedGguf(f"has layers of {sorted(set(heads))} kv heads")
    values["layer_types"] = ["full_attention" if count else "conv" for count in heads]
    values["norm_eps"] = values.pop("rms_norm_eps")
    values["conv_L_cache"] = read.count("shortconv.l_cache")
    values["block_auto_adjust_ff_dim"] = False  # the width that is stated is the adjusted one


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM", _LLAMA, _TOP, paired_rows=True, complete=_llama
    ),
    "mistral3": Architecture(
        "MistralForCausalLM", _LLAMA, _TOP, paired_rows=True, complete=_mistral3
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", _LLAMA, _TOP),
    "qwen3": Architecture("Qwen3ForCausalLM", {**_LLAMA, **_HEAD_NORMS}, _TOP),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        {
            **_BEFORE,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            **_GATE_UP,
        },
        _TOP,
        complete=_phi3,
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        {**_AROUND, **_ATTENTION, **_MLP},
        _TOP,
        norms_plus_one=True,
        complete=_gemma2,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        {**_AROUND, **_ATTENTION, **_HEAD_NORMS, **_MLP},
        _TOP,
        norms_plus_one=True,
        complete=_gemma3,
    ),
    "chatglm": Architecture(
        "GlmForCausalLM", {**_BEFORE, **_ATTENTION, **_GATE_UP}, _TOP, complete=_glm
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        {
            **_BEFORE,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            **_ATTENTION,
            **_GATE_UP,
        },
        _TOP,
        complete=_glm,
    ),
    "granite": Architecture(
        "GraniteForCausalLM", _LLAMA, _TOP, paired_rows=True, complete=_granite
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM", {**_AFTER, **_ATTENTION, **_HEAD_NORMS, **_MLP}, _TOP, complete=_olmo2
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM", _LLAMA, _TOP, paired_rows=True, complete=_smollm3
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        {**_BEFORE, **_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _TOP,
        complete=_starcoder2,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        {
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            **_ATTENTION,
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        {
            "token_embd": "model.embed_tokens",
            "token_embd_norm": "model.embedding_norm",
            "output": "lm_head",
        },
        complete=_lfm2,
    ),
}  # fmt: skip


def architecture_of(name: str) -> Architecture:
    """
    Raises:
        UnsupportedGguf: none that is read here.
    """
    if name not in ARCHITECTURES:
        raise UnsupportedGguf(
            f"is of the architecture {name!r}; those that are read are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def layer_count(tensors: Mapping[str, Any]) -> int:
    """How many layers have a tensor.

    Raises:
        BrokenGguf: one is missing among them.
    """
    found = {name.split(".", 2)[1] for name in tensors if name.startswith("blk.")}
    if found != {str(layer) for layer in range(len(found))}:
        raise BrokenGguf("has layers that are not counted from 0")
    return len(found)
