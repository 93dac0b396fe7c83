"""Tiny random transformers models, seeded, and what generating with them takes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")

VOCAB = 97
EOS = VOCAB - 1
LAYERS = 3
LAYER_MODULES = 6  # that a patch fuses: the attention, its four projections, the MLP
FUSED_MODULES = LAYERS * LAYER_MODULES + 2  # and the head, and the model itself


def scale_weights(model: nn.Module, seed: int = 0) -> Any:
    """Random weights that keep activations near 1, so that tokens differ and positions count."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values * 1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def tiny_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 48,  # 4 heads of 12: no power of two anywhere
            "intermediate_size": 88,  # not a multiple of a panel of 16
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "eos_token_id": EOS,
            "bos_token_id": None,
            "pad_token_id": 0,
            **changes,
        }
    )


def tiny_llama(
    seed: int = 0, *, head: bool = True, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A LlamaForCausalLM, or a LlamaModel without `head`, in eval mode.

    `dtype` is that of the parameters: as in `from_pretrained`, RoPE's frequencies stay float32.
    """
    from transformers import LlamaForCausalLM, LlamaModel

    attn_implementation = changes.pop("attn_implementation", "sdpa")
    config = tiny_config(**changes)
    config._attn_implementation = attn_implementation
    model = scale_weights((LlamaForCausalLM if head else LlamaModel)(config), seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def prompt(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Token ids [batch, length] that are neither padding nor the end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, EOS, (batch, length), generator=generator)


def left_padded(ids: torch.Tensor, padding: list[int]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` with so many padding tokens at the start of each row."""
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def cache_name(model: nn.Module) -> str:
    """How the model's forward and `generate` call the cache: transformers 5.24 renamed it."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def generate(model: nn.Module, inputs: Any, *, cache: Any = None, **options: Any) -> torch.Tensor:
    """Greedy token ids, 12 new ones and no end before that, unless the options say otherwise."""
    if isinstance(inputs, torch.Tensor):
        inputs = left_padded(inputs, [])
    if cache is not None:
        options[cache_name(model)] = cache
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **options}
    return model.generate(**inputs, **options)


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor, *, cache: Any = None, **options: Any) -> Any:
    """The logits, or the last hidden state of a model without a head."""
    if cache is not None:
        options[cache_name(model)] = cache
    outputs = model(ids, **options)
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
