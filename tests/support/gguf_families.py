"""Tiny models of transformers, one for each architecture of GGUF files that is read.

Each has what sets its family apart: heads that are wider than hidden / heads, windows that a
prompt of twenty tokens leaves, scales that are not 1, layers of every kind.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

VOCAB = 64
HIDDEN = 32
WINDOW = 8

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_LONG = [1.0, 1.5, 2.0, 3.0]
_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
_GLM = {
    "head_dim": 8, "attention_bias": True, "tie_word_embeddings": False,
    "rope_parameters": {**_ROPE, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip

# Name of the case: llama.cpp's architecture, the class of transformers, what its config has.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {"head_dim": 16, "rope_parameters": _LLAMA3}),
    "mistral": ("llama", "Mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "mistral_window": ("llama", "Mistral", {"sliding_window": WINDOW}),
    "mistral3": ("mistral3", "Mistral", {"head_dim": 16, "sliding_window": None}),
    "ministral3": (
        "mistral3", "Ministral3",
        {"head_dim": 16, "rope_parameters": {
            **_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }},
    ),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen2_yarn": ("qwen2", "Qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "phi3": (
        "phi3", "Phi3",
        {
            "num_attention_heads": 2, "original_max_position_embeddings": 256,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": _LONG,
                "short_factor": [1.0, 1.1, 1.2, 1.3], "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "phi3_window": (
        "phi3", "Phi3", {"sliding_window": WINDOW, "tie_word_embeddings": False,
        "original_max_position_embeddings": 128},
    ),
    "gemma2": (
        "gemma2", "Gemma2",
        {
            **_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0,
            "rope_parameters": {**_ROPE, "rope_theta": 10000.0},  # the converter's, always
        },
    ),
    "gemma3": (
        "gemma3", "Gemma3",
        {
            **_GEMMA, "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "glm": ("chatglm", "Glm", _GLM),
    "glm4": ("glm4", "Glm4", {**_GLM, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "granite": (
        "granite", "Granite",
        {
            "attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.5,
            "logits_scaling": 3.0,
        },
    ),
    "olmo2": ("olmo2", "Olmo2", {"tie_word_embeddings": False}),
    "olmo3": (
        "olmo2", "Olmo3",
        {
            "sliding_window": WINDOW, "num_hidden_layers": 5,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3": ("smollm3", "SmolLM3", {"num_hidden_layers": 4}),
    "starcoder2": ("starcoder2", "Starcoder2", {"use_bias": True, "norm_epsilon": 1e-5}),
    "lfm2": (
        "lfm2", "Lfm2",
        {
            "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5, "conv_L_cache": 3,
        },
    ),
}  # fmt: skip


def config(family: str, **changes: Any) -> Any:
    import transformers

    _, name, own = FAMILIES[family]
    kind: Any = getattr(transformers, f"{name}ForCausalLM").config_class
    values = {"rope_parameters": dict(_ROPE), **_SIZES, **own, **changes}
    for absent, names in {"rms_norm_eps": ("Starcoder2", "Lfm2")}.items():
        if name in names:
            del values[absent]
    made = kind(**values)
    made._attn_implementation = "eager"
    return made


def tiny(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family, in float32 and eval mode.

    Weights keep activations near 1 and logits apart, so that greedy tokens differ and positions
    count; norms lie around what leaves a vector as it is.
    """
    import transformers

    made = config(family, **changes)
    model: Any = getattr(transformers, f"{FAMILIES[family][1]}ForCausalLM")(made)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                about = 0.0 if family.startswith("gemma") else 1.0
                parameter.copy_((about + 0.2 * values).bfloat16())
            elif parameter.dim() == 1:
                parameter.copy_((0.3 * values).bfloat16())
            else:
                parameter.copy_((values * 1.5 * parameter[0].numel() ** -0.5).bfloat16())
    return model.eval()


def prompt(length: int = 20, seed: int = 1) -> torch.Tensor:
    """Token ids [1, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (1, length), generator=generator)


@torch.inference_mode()
def greedy(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    """The greedy tokens after a prompt, each from a forward over all before it."""
    for _ in range(count):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[0, -count:].tolist()
