"""Models of transformers without values, to be filled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fasttps.models.packed_linear import PackedEmbedding
from fasttps.models.packed_module import PackedModule


def empty_model(kind: Any, config: Any) -> Any:
    """A `kind` whose Parameters are on the meta device, in the config's dtype; buffers are made."""
    with torch.device("meta"):
        model = kind(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(config.dtype)
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if any(buffer.is_meta for buffer in module._buffers.values() if buffer is not None):
                if "embed_scale" in module._buffers:  # Gemma's embedding
                    module.embed_scale = torch.tensor(config.hidden_size**0.5)
                else:
                    setattr(parent, name, type(module)(config))  # RoPE: a config is enough
    return model


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put another Parameter wherever a model has this one."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """`.to(dtype)` of the Parameters alone: RoPE's frequencies stay float32, as transformers'."""
    for module in model.modules():
        if isinstance(module, (PackedModule, PackedEmbedding)):
            module.to(dtype)
            continue
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
    if hasattr(model, "config"):
        model.config.dtype = dtype
