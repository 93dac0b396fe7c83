"""The tensors of a GGUF file of the Llama architecture, under the names that transformers has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttps.gguf.config import UnsupportedGguf
from fasttps.gguf.header import BrokenGguf, Header, TensorInfo

ROPE_FACTORS = "rope_freqs.weight"

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Tensors:
    """The data of a file, mapped into memory: pages are read as they are used."""

    def __init__(self, path: Path, header: Header) -> None:
        if header.byte_order != "little":
            raise UnsupportedGguf("is big-endian")
        self._infos = header.tensors
        size = path.stat().st_size
        self._data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    def names(self) -> Iterator[tuple[str, str]]:
        """Each tensor's name in the file, and its parameter's name in transformers' Llama.

        Raises:
            UnsupportedGguf: a tensor has no place in that model.
        """
        for name in self._infos:
            if name != ROPE_FACTORS:
                yield name, parameter_name(name)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def blocks(self, name: str, rope_heads: int | None = None) -> Tensor:
        """The bytes [rows, bytes of a row] of a tensor, as they are in the file.

        rope_heads: of a query or key projection, its number of heads: the file has the rows of a
            head as [head_dim / 2, 2], the pairs of RoPE, and transformers as [2, head_dim / 2].
            Whole rows move.
        """
        info = self._infos[name]
        rows = info.shape[0] if len(info.shape) == 2 else 1
        data = self._data[info.begin : info.end].view(rows, -1)
        if rope_heads is None:
            return data
        pairs = data.view(rope_heads, rows // rope_heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(rows, -1)

    def values(self, name: str, rope_heads: int | None = None) -> Tensor:
        """The dequantised tensor in float32, of any type that the gguf package dequantises."""
        info = self._infos[name]
        if len(info.shape) == 1 and rope_heads is not None:  # a bias: one element a row
            item = (info.end - info.begin) // info.shape[0]
            data = self._data[info.begin : info.end].view(rope_heads, -1, 2, item)
            blocks = data.transpose(1, 2).reshape(1, -1)
        else:
            blocks = self.blocks(name, rope_heads)
        return dequantize(blocks, info).reshape(info.shape)


def dequantize(blocks: Tensor, info: TensorInfo) -> Tensor:
    """Blocks [rows, bytes of a row] as float32 [rows, cols].

    Raises:
        UnsupportedGguf: the gguf package cannot dequantise the type.
    """
    plain = _PLAIN.get(info.type_name)
    if plain is not None:
        # A copy, since a file's alignment may be less than an element's.
        return blocks.contiguous().clone().view(plain).float()
    from gguf import GGMLQuantizationType, quants

    try:
        values: Any = quants.dequantize(blocks.numpy(), GGMLQuantizationType(info.kind))
    except NotImplementedError as error:
        raise UnsupportedGguf(f"has {info.name} in the type {info.type_name}") from error
    return torch.from_numpy(values)


def parameter_name(name: str) -> str:
    """What transformers' Llama calls the tensor that llama.cpp calls `name`."""
    if match := re.fullmatch(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        if part in _LAYER:
            return f"model.layers.{int(layer)}.{_LAYER[part]}.{kind}"
    else:
        part, _, kind = name.rpartition(".")
        if part in _MODEL and kind == "weight":
            return f"{_MODEL[part]}.{kind}"
    raise UnsupportedGguf(f"has a tensor {name}, for which a Llama of transformers has no place")


def check_fits(tensors: Tensors, shapes: dict[str, tuple[int, ...]]) -> None:
    """Hold the tensors of a file against the parameters of a model.

    Raises:
        BrokenGguf: one is missing, too many, or of another shape.
    """
    found = {}
    for name, parameter in tensors.names():
        if parameter not in shapes:
            raise BrokenGguf(f"has a tensor {name} that its metadata leave no place for")
        if tensors.info(name).shape != shapes[parameter]:
            raise BrokenGguf(
                f"has {name} of the shape {list(tensors.info(name).shape)}, and its metadata "
                f"say {list(shapes[parameter])}"
            )
        found[parameter] = name
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        raise BrokenGguf(f"lacks {len(missing)} of the model's weights, such as {missing[0]}")
