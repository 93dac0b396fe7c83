"""The tensors of a GGUF file under the names that transformers has."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttps.gguf.architectures import Architecture
from fasttps.gguf.header import BrokenGguf, Header, TensorInfo, UnsupportedGguf
from fasttps.gguf.rope import FACTORS

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QKV = "attn_qkv"


@dataclass(frozen=True)
class Place:
    """Where the values of a parameter lie.

    Attributes:
        info: the tensor that has them.
        shape: of the parameter.
        begin_row: of the tensor, whose first rows may be another parameter's.
        heads: whose rows are paired for RoPE in the file; 0: none are.
        minus: what is to be subtracted.
    """

    info: TensorInfo
    shape: tuple[int, ...]
    begin_row: int = 0
    heads: int = 0
    minus: int = 0

    @property
    def type_name(self) -> str:
        return self.info.type_name

    @property
    def row_bytes(self) -> int:
        return (self.info.end - self.info.begin) // self.info.shape[0]


class Tensors:
    """The tensors of a file under transformers' names, each read when it is asked for.

    Attributes:
        path: of the file.
        places: parameter's name to where its values are.
    """

    def __init__(self, path: Path, header: Header, architecture: Architecture, config: Any) -> None:
        """
        Raises:
            UnsupportedGguf: a tensor has no place in transformers' class, or the file is
                big-endian.
            BrokenGguf: queries, keys and values in one tensor that has not their rows.
        """
        if header.byte_order != sys.byteorder:
            raise UnsupportedGguf(f"is {header.byte_order}-endian")
        self.path = path
        self.places: dict[str, Place] = {}
        self._architecture = architecture
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._heads = {"attn_q": heads, "attn_k": kv_heads}
        for name, info in header.tensors.items():
            if name in FACTORS:
                continue
            before, part, kind = _split(name)
            if part == _QKV and _QKV not in architecture.layer:
                head_dim = getattr(config, "head_dim", config.hidden_size // heads)
                rows = {part: count * head_dim for part, count in self._heads.items()}
                rows["attn_v"] = rows["attn_k"]
                if info.shape[:1] != (sum(rows.values()),):
                    raise BrokenGguf(f"has {name} of the shape {list(info.shape)}")
                begin = 0
                for one, count in rows.items():
                    self._put(before, one, kind, info, begin, (count, *info.shape[1:]))
                    begin += count
            else:
                self._put(before, part, kind, info, 0, info.shape)

    def _put(
        self,
        before: str,
        part: str,
        kind: str,
        info: TensorInfo,
        begin_row: int,
        shape: tuple[int, ...],
    ) -> None:
        made = self._architecture
        theirs = (made.layer if before else made.top).get(part)
        if theirs is None:
            raise UnsupportedGguf(
                f"has a tensor {info.name}, for which transformers' {made.model} has no place"
            )
        if part == "shortconv.conv" and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        heads = self._heads.get(part, 0) if made.paired_rows else 0
        if heads and shape[0] % (2 * heads):
            raise BrokenGguf(f"has {info.name} of {shape[0]} rows for {heads} heads")
        minus = int(made.norms_plus_one and part.endswith("norm"))
        parameter = f"{before}{theirs}.{kind}"
        if parameter in self.places:
            raise BrokenGguf(f"has {parameter} twice")
        self.places[parameter] = Place(info, shape, begin_row, heads, minus)

    def blocks(self, parameter: str) -> Tensor:
        """The bytes [rows, bytes of a row] of a parameter, a vector's elements being its rows."""
        return self.rows(parameter, 0, self.places[parameter].shape[0])

    def rows(
        self,
        parameter: str,
        begin: int,
        end: int,
        into: Tensor | None = None,
        file: Any = None,
    ) -> Tensor:
        """The bytes of some rows, read from `file` and into the memory `into` if those are given.

        Where the file has the rows of a head of queries or keys as [head_dim / 2, 2], the pairs of
        RoPE, and transformers as [2, head_dim / 2], whole rows move. Then they are those of whole
        heads.
        """
        place = self.places[parameter]
        at = place.info.begin + (place.begin_row + begin) * place.row_bytes
        count = end - begin
        if into is None:
            into = torch.empty(count * place.row_bytes, dtype=torch.uint8)
        with nullcontext(file) if file is not None else open_file(self.path) as source:
            data = read_into(into, source, place.info, at).view(count, place.row_bytes)
        if not place.heads:
            return data
        head_rows = place.shape[0] // place.heads
        pairs = data.view(count // head_rows, head_rows // 2, 2, place.row_bytes)
        return pairs.transpose(1, 2).reshape(count, place.row_bytes)

    def values(self, parameter: str) -> Tensor:
        """The dequantised parameter in float32, of any type that the gguf package dequantises."""
        place = self.places[parameter]
        found = dequantize(self.blocks(parameter), place.info, place.shape)
        return found - place.minus if place.minus else found

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Hold the tensors against the parameters of a model.

        Raises:
            BrokenGguf: one is missing, too many, or of another shape.
        """
        for parameter, place in self.places.items():
            name = place.info.name
            if parameter not in shapes:
                raise BrokenGguf(f"has a tensor {name} that its metadata leave no place for")
            if place.shape != shapes[parameter]:
                raise BrokenGguf(
                    f"has {name} of the shape {list(place.shape)}, and its metadata "
                    f"say {list(shapes[parameter])}"
                )
        missing = sorted(shapes.keys() - self.places.keys())
        if missing:
            raise BrokenGguf(f"lacks {len(missing)} of the model's weights, such as {missing[0]}")


def rope_factors(path: Path, header: Header) -> dict[str, list[float]]:
    """The values of those tensors that are factors of RoPE's frequencies."""
    found = {}
    for name in FACTORS:
        if (info := header.tensors.get(name)) is not None:
            if len(info.shape) != 1 or info.shape[0] > 2**16:
                raise BrokenGguf(f"has {name} of the shape {list(info.shape)}")
            found[name] = dequantize(read_bytes(path, info), info, info.shape).tolist()
    return found


def read_bytes(path: Path, info: TensorInfo) -> Tensor:
    """The bytes of a tensor."""
    data = torch.empty(info.end - info.begin, dtype=torch.uint8)
    with open_file(path) as file:
        return read_into(data, file, info, info.begin)


def open_file(path: Path) -> FileIO:
    """The file, to be read in large pieces."""
    return path.open("rb", buffering=0)


def read_into(data: Tensor, file: FileIO, info: TensorInfo, begin: int) -> Tensor:
    """Fill `data` with the bytes of a tensor from `begin` of the file on.

    Read, not mapped: so they are gone once they are packed, and a file that has been cut short
    since its header was read is an error and no signal.
    """
    left = data.numpy().data
    file.seek(begin)
    while left:
        count = file.readinto(left)
        if not count:
            raise BrokenGguf(f"is cut short: tensor {info.name} cannot be read")
        left = left[count:]
    return data


def dequantize(blocks: Tensor, info: TensorInfo, shape: tuple[int, ...]) -> Tensor:
    """The values of a tensor's blocks, in float32 and in a shape.

    Raises:
        UnsupportedGguf: the gguf package cannot dequantise the type.
    """
    plain = _PLAIN.get(info.type_name)
    if plain is not None:
        # A copy, since a file's alignment may be less than an element's.
        return blocks.contiguous().clone().view(plain).float().reshape(shape)
    from gguf import GGMLQuantizationType, quants

    try:
        values: Any = quants.dequantize(blocks.numpy(), GGMLQuantizationType(info.kind))
    except NotImplementedError as error:
        raise UnsupportedGguf(f"has {info.name} in the type {info.type_name}") from error
    return torch.from_numpy(values).reshape(shape)


def _split(name: str) -> tuple[str, str, str]:
    """transformers' prefix of a layer, llama.cpp's name of the module, and weight or bias."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z0-9_.]+)\.(weight|bias)", name)
    if match is None:
        raise UnsupportedGguf(f"has a tensor {name}, which is neither a weight nor a bias")
    layer, part, kind = match.groups()
    return "" if layer is None else f"model.layers.{int(layer)}.", part, kind
