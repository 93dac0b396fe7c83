"""A StaticKVCache in a safetensors file: the rows that are filled, and what they belong to.

Tensors: seq_lens; "LAYER.keys", ".values" and, of int8, ".k_scale" and ".v_scale", each
[batch, num_kv_heads, used slots, ...]; the states of other layers as "LAYER.conv_states.NUMBER".
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasttps.kv_cache.layer import StaticKVLayer

if TYPE_CHECKING:
    from fasttps.kv_cache.cache import StaticKVCache

_VERSION = "1"
_BUFFERS = ("keys", "values", "k_scale", "v_scale")
_STATES = ("conv_states", "recurrent_states")


def save_cache(cache: StaticKVCache, path: str | os.PathLike[str]) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {"seq_lens": cache.seq_lens}
    for at, layer in enumerate(cache.layers):
        for name, tensor in _held(layer).items():
            tensors[f"{at}.{name}"] = tensor.contiguous()
    metadata = {
        "fasttps_kv_cache": _VERSION,
        "layers": _describe(cache),
        "key_dtype": str(cache.kv_layers[0].key_dtype),
    }
    save_file(tensors, os.fspath(path), metadata)


def load_cache(cache: StaticKVCache, path: str | os.PathLike[str]) -> None:
    tensors, metadata = _read(path)
    if metadata.get("fasttps_kv_cache") != _VERSION or "seq_lens" not in tensors:
        raise ValueError(f"StaticKVCache: {path} wanted a cache of version {_VERSION}, got none")
    if metadata["layers"] != (ours := _describe(cache)):
        raise ValueError(
            f"StaticKVCache: {path} wanted {ours}, got {metadata['layers']}: it is of another "
            "model, dtype or spare_slots"
        )
    seq_lens = tensors.pop("seq_lens")
    length = int(seq_lens.max())
    if length > cache.max_seq_len:
        raise ValueError(
            f"StaticKVCache: max_seq_len wanted at least the {length} tokens of {path}, got "
            f"{cache.max_seq_len}; grow() it"
        )
    rows = _rows_of_layers(cache, tensors, length, path)
    key_dtype: Any = getattr(torch, metadata.get("key_dtype", "").removeprefix("torch."), None)
    cache.reset()
    for at, layer in enumerate(cache.layers):
        if not isinstance(layer, StaticKVLayer):
            _restore_states(layer, at, tensors)
        elif length > 0:
            layer.restore(rows[at], key_dtype, length)
    cache._steps.replace(seq_lens)


def _rows_of_layers(
    cache: StaticKVCache, tensors: dict[str, Tensor], length: int, path: Any
) -> dict[int, list[Tensor]]:
    """Of each layer of keys and values, those and their scales, of one shape."""
    rows = {}
    for at, layer in enumerate(cache.layers):
        if length == 0 or not isinstance(layer, StaticKVLayer):
            continue
        used = min(length, layer.slots)
        held = [tensors[f"{at}.{name}"] for name in _BUFFERS if f"{at}.{name}" in tensors]
        if len(held) not in (2, 4) or any(
            x.dim() < 3 or x.shape[:3] != held[0].shape[:3] or x.size(2) != used for x in held
        ):
            raise ValueError(f"StaticKVCache: {path} lacks the {used} rows of layer {at}")
        rows[at] = held
    return rows


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"StaticKVCache: {path} is no safetensors file: {error}") from error


def _describe(cache: StaticKVCache) -> str:
    """What a file must agree in with a cache: the kind of each layer."""
    return ", ".join(
        layer.kind if isinstance(layer, StaticKVLayer) else type(layer).__name__
        for layer in cache.layers
    )


def _held(layer: Any) -> dict[str, Tensor]:
    if isinstance(layer, StaticKVLayer):
        return {
            name: buffer[:, :, : layer.used]
            for name in _BUFFERS
            if (buffer := getattr(layer, name)) is not None
        }
    return {
        f"{name}.{at}": state
        for name in _STATES
        for at, state in getattr(layer, name).items()
        if state is not None
    }


def _restore_states(layer: Any, at: int, tensors: dict[str, Tensor]) -> None:
    for name in _STATES:
        for number in getattr(layer, name):
            state = tensors.get(f"{at}.{name}.{number}")
            if state is not None:
                layer.lazy_initialization(**{name: state}, state_idx=number)
                getattr(layer, name)[number].copy_(state)
                layer.has_previous_state[number] = True
