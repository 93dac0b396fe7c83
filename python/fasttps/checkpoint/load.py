"""`fasttps.load_checkpoint`: a HuggingFace folder of AWQ, GPTQ or compressed-tensors, packed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fasttps.checkpoint.pack import fill, pack_model
from fasttps.checkpoint.schemes import (
    BrokenCheckpoint,
    UnsupportedCheckpoint,
    quantization_config,
    scheme_of,
)
from fasttps.checkpoint.tensors import Tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# What `load_checkpoint` calls as it advances: modules done, modules in all, the name of the last.
Progress = Callable[[int, int, str], None]


class LoadedCheckpoint(NamedTuple):
    """A model of transformers in eval mode, its tokenizer (None: the folder has none), the patch.

    `patch.undo()` gives the model the weights dequantised, read from the folder once more; None
    where the model was loaded so.
    """

    model: Any
    tokenizer: Any
    patch: Any


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    pack: bool = True,
    kv: str | None = None,
    int8_activation: bool = True,
    progress: Progress | None = None,
) -> LoadedCheckpoint:
    """Load a folder whose weights are quantised, patched, its quants and scales as they are.

    Read are AWQ (gemm), GPTQ of 4 and 8 bits (act-order too) and compressed-tensors of int4 and
    int8 weights, in safetensors. What no packed format holds bit for bit is dequantised and packed
    in `dtype`, and the patch's report says which. Nothing is fetched, and nothing in the files is
    trusted.

    Args:
        dtype: float32, bfloat16 or float16: of activations, norms and whatever is not quantised;
            None: the config's.
        pack: False: dequantise everything, and patch nothing.
        kv: what `StaticKVCache.for_model` makes the cache of: "bf16", "int8", or None: `dtype`.
        int8_activation: products with quantised weights round the activations to int8 in groups
            of 32, which is much faster.
        progress: called after each module with (modules done, modules in all, its name).

    Raises:
        UnsupportedCheckpoint: the scheme, or the model, is not read; a ValueError.
        BrokenCheckpoint: a file is cut short, or the files do not fit together; a ValueError.
        OSError: a file cannot be read.
    """
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(
            f"load_checkpoint: dtype wanted None, float32, bfloat16 or float16, got {dtype}"
        )
    if not pack and kv is not None:
        raise ValueError(f"load_checkpoint: kv wanted None with pack=False, got {kv!r}")
    folder = Path(folder)
    model, tensors = open_folder(folder, dtype)
    tokenizer = _tokenizer(folder)
    _take_places(model)
    if not pack:
        fill(model, tensors, frozenset())
        return LoadedCheckpoint(model, tokenizer, None)
    patch = pack_model(model, tensors, kv=kv, int8_activation=int8_activation, progress=progress)
    return LoadedCheckpoint(model, tokenizer, patch)


def load_model(folder: Path) -> Any:
    """The model alone, as `load_checkpoint` has it by default."""
    model, tensors = open_folder(folder)
    _take_places(model)
    pack_model(model, tensors, kv=None, int8_activation=True, progress=None)
    return model


def open_folder(folder: Path, dtype: torch.dtype | None = None) -> tuple[Any, Tensors]:
    """The model on the meta device but for its buffers, and the tensors, which fit it.

    Raises:
        UnsupportedCheckpoint, BrokenCheckpoint, OSError: as `load_checkpoint`.
    """
    stated = quantization_config(folder)
    if stated is None:
        raise UnsupportedCheckpoint("states no quantisation in its config.json")
    tensors = Tensors(folder, scheme_of(stated))
    model = _empty_model(folder, tensors, dtype)
    tensors.check_fits(model)
    return model, tensors


def _empty_model(folder: Path, tensors: Tensors, dtype: torch.dtype | None) -> Any:
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from fasttps.packed_model.skeleton import empty_model

    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if kind is None:
            raise UnsupportedCheckpoint(f"is a {config.model_type}, which is no causal LM")
        for name in ("quantization_config", "compression_config"):
            if hasattr(config, name):
                delattr(config, name)
        # Before a module is made for each: a config may state two billion.
        if config.num_hidden_layers > len(tensors.quantized):
            raise BrokenCheckpoint(
                f"has {len(tensors.quantized)} quantised weights and states "
                f"{config.num_hidden_layers} layers"
            )
        config.dtype = dtype or (config.dtype if config.dtype in DTYPES else torch.bfloat16)
        model = empty_model(kind, config)
        if any(buffer.is_meta for buffer in model.buffers()):
            raise UnsupportedCheckpoint(f"is a {kind.__name__}, whose buffers cannot be made")
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(
                str(folder), local_files_only=True
            )
    except (BrokenCheckpoint, UnsupportedCheckpoint):
        raise
    except Exception as error:  # transformers raises nearly anything on a broken config
        raise BrokenCheckpoint(f"has a config that makes no model: {error}") from error
    model.config.name_or_path = str(folder)
    return model.eval()


def _take_places(model: nn.Module) -> None:
    """Memory for every parameter, which takes none as long as nothing is written to it."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(
                        torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=False
                    )
                module._parameters[name] = made[id(parameter)]


def _tokenizer(folder: Path) -> Any:
    """That of the folder, if it has one."""
    import transformers

    if not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise BrokenCheckpoint(f"has a tokenizer that cannot be read: {error}") from error
