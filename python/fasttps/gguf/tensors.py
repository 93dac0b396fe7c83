"""The tensors of a GGUF file of the Llama architecture, under the names that transformers has."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
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
    """The tensors of a file under transformers' names, each read when it is asked for.

    Attributes:
        path: of the file.
        infos: parameter's name to the place of its tensor.
    """

    def __init__(self, path: Path, header: Header, heads: int, kv_heads: int) -> None:
        """
        Args:
            heads, kv_heads: of the queries, and of keys and values.

        Raises:
            UnsupportedGguf: a tensor has no place in transformers' Llama, or the file is
                big-endian.
        """
        if header.byte_order != sys.byteorder:
            raise UnsupportedGguf(f"is {header.byte_order}-endian")
        self.path = path
        self.infos = {
            parameter_name(name): info
            for name, info in header.tensors.items()
            if name != ROPE_FACTORS
        }
        self._heads = {"q_proj": heads, "k_proj": kv_heads}

    def blocks(self, parameter: str) -> Tensor:
        """The bytes [rows, bytes of a row] of a tensor, a vector's elements being its rows.

        The file has the rows of a head of queries or keys as [head_dim / 2, 2], the pairs of
        RoPE, and transformers as [2, head_dim / 2]: whole rows move.
        """
        info = self.infos[parameter]
        rows = info.shape[0]
        data = read_bytes(self.path, info).view(rows, -1)
        heads = self._heads.get(parameter.split(".")[-2])
        if heads is None:
            return data
        pairs = data.view(heads, rows // heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(rows, -1)

    def values(self, parameter: str) -> Tensor:
        """The dequantised tensor in float32, of any type that the gguf package dequantises."""
        return dequantize(self.blocks(parameter), self.infos[parameter])

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Hold the tensors against the parameters of a model.

        Raises:
            BrokenGguf: one is missing, too many, or of another shape.
        """
        for parameter, info in self.infos.items():
            if parameter not in shapes:
                raise BrokenGguf(f"has a tensor {info.name} that its metadata leave no place for")
            if info.shape != shapes[parameter]:
                raise BrokenGguf(
                    f"has {info.name} of the shape {list(info.shape)}, and its metadata "
                    f"say {list(shapes[parameter])}"
                )
        missing = sorted(shapes.keys() - self.infos.keys())
        if missing:
            raise BrokenGguf(f"lacks {len(missing)} of the model's weights, such as {missing[0]}")


def read_bytes(path: Path, info: TensorInfo) -> Tensor:
    """The bytes of a tensor.

    Read, not mapped: so they are gone once they are packed, and a file that has been cut short
    since its header was read is an error and no signal.
    """
    data = torch.empty(info.end - info.begin, dtype=torch.uint8)
    left = data.numpy().data
    with path.open("rb", buffering=0) as file:
        file.seek(info.begin)
        while left:
            count = file.readinto(left)
            if not count:
                raise BrokenGguf(f"is cut short: tensor {info.name} cannot be read")
            left = left[count:]
    return data


def dequantize(blocks: Tensor, info: TensorInfo) -> Tensor:
    """The values of a tensor's blocks, in float32 and in its shape.

    Raises:
        UnsupportedGguf: the gguf package cannot dequantise the type.
    """
    plain = _PLAIN.get(info.type_name)
    if plain is not None:
        # A copy, since a file's alignment may be less than an element's.
        return blocks.contiguous().clone().view(plain).float().reshape(info.shape)
    from gguf import GGMLQuantizationType, quants

    try:
        values: Any = quants.dequantize(blocks.numpy(), GGMLQuantizationType(info.kind))
    except NotImplementedError as error:
        raise UnsupportedGguf(f"has {info.name} in the type {info.type_name}") from error
    return torch.from_numpy(values).reshape(info.shape)


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
