"""A tiny random model of each family that `fasttps.patch` knows, in float32, seeded.

Odd sizes, several layers, grouped heads, and windows that a prompt of a test goes past.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.llama import EOS, VOCAB, scale_weights

WINDOW = 7  # of sliding layers

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 88,  # not a multiple of a panel of 16
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Family:
    """A family, or one of its kinds.

    Attributes:
        module: of transformers.models; `kind` begins the names of its classes.
        changes: to the common sizes of a config.
        fused: modules that a patch fuses in all, and `left`, those it reports as left alone.
    """

    name: str
    module: str
    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    fused: int = 0
    left: int = 0

    def config(self, **changes: Any) -> Any:
        module = importlib.import_module(f"transformers.models.{self.module}")
        suffix = "TextConfig" if self.kind == "Gemma3" else "Config"
        return getattr(module, f"{self.kind}{suffix}")(**{**_SIZES, **self.changes, **changes})

    def model(self, seed: int = 0, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        """The causal LM in eval mode; `dtype` is that of the parameters."""
        module = importlib.import_module(f"transformers.models.{self.module}")
        config = self.config(**changes)
        config._attn_implementation = "eager"  # the plain one, which all families have
        model = scale_weights(getattr(module, f"{self.kind}ForCausalLM")(config), seed)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model


# A layer: attention, four projections, MLP; and the head.
_LAYER, _HEAD = 6, 1
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES = {
    family.name: family
    for family in (
        Family("llama2", "llama", "Llama", {"num_key_value_heads": 4}, 26),
        Family("llama3.1", "llama", "Llama", {"rope_parameters": _LLAMA3_ROPE}, 26),
        Family("mistral", "mistral", "Mistral", {"sliding_window": WINDOW}, 26),
        Family(
            "qwen2",
            "qwen2",
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
            26,
        ),
        Family("qwen3", "qwen3", "Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, 27),
        Family("phi3", "phi3", "Phi3", {"sliding_window": None}, 18),
        Family(
            "phi3-longrope",
            "phi3",
            "Phi3",
            {
                "hidden_size": 64,
                "original_max_position_embeddings": 24,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.75,
                    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
                    "original_max_position_embeddings": 24,
                },
                "sliding_window": 12,
            },
            18,
        ),
        Family(
            "gemma2",
            "gemma2",
            "Gemma2",
            {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24},
            27,
        ),
        Family(
            "gemma3",
            "gemma3",
            "Gemma3",
            {
                "head_dim": 16,
                "sliding_window": WINDOW,
                "layer_types": _ALTERNATING,
                "query_pre_attn_scalar": 24,
            },
            27,
        ),
        Family("glm", "glm", "Glm", {"head_dim": 12, "attention_bias": True}, 26),
        Family(
            "lfm2",
            "lfm2",
            "Lfm2",
            {
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
                "block_auto_adjust_ff_dim": False,
            },
            16,
        ),
        Family(
            "granite",
            "granite",
            "Granite",
            {
                "attention_multiplier": 0.2,
                "residual_multiplier": 0.7,
                "embedding_multiplier": 3.0,
                "logits_scaling": 2.0,
            },
            26,
        ),
        Family("olmo2", "olmo2", "Olmo2", {}, 26),
        Family("smollm3", "smollm3", "SmolLM3", {"no_rope_layers": [1, 0, 1, 1]}, 27),
        Family("starcoder2", "starcoder2", "Starcoder2", {"sliding_window": WINDOW}, 30),
        Family(
            "mixtral",
            "mixtral",
            "Mixtral",
            {"num_local_experts": 3, "sliding_window": WINDOW},
            21,
            4,
        ),
        Family(
            "qwen3-moe",
            "qwen3_moe",
            "Qwen3Moe",
            {**_MOE, "num_experts": 3, "head_dim": 16, "mlp_only_layers": [1]},
            22,
            3,
        ),
        Family(
            "olmoe",
            "olmoe",
            "Olmoe",
            {"num_experts": 3, "num_experts_per_tok": 2, "clip_qkv": 1.5},
            21,
            4,
        ),
        Family(
            "gpt-oss",
            "gpt_oss",
            "GptOss",
            {
                "head_dim": 16,
                "num_local_experts": 3,
                "num_experts_per_tok": 2,
                "sliding_window": WINDOW,
                "layer_types": _ALTERNATING,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            21,
            4,
        ),
    )
}

each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
