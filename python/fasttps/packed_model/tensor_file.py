"""safetensors files whose tensors all lie at multiples of 64 bytes, written and mapped.

8 bytes: the header's length, little endian; the header, JSON padded with spaces; the data. What
pads a tensor is a tensor too, "_padding.N", for the format allows no gaps.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttps.messages import OneLineError

ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
_PADDING = "_padding."
_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class BrokenTensorFile(OneLineError):
    """A file is no safetensors file, or is cut short."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file; one that has the name already is replaced, and stays whole for its readers."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        if padding := -end % ALIGNMENT_BYTES:
            header[f"{_PADDING}{len(header)}"] = {
                "dtype": "U8",
                "shape": [padding],
                "data_offsets": [end, end + padding],
            }
        at = end + padding
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for tensor in tensors.values():
                if tensor.numel():
                    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
                    file.write(data.numpy().data)
                file.write(bytes(-tensor.nbytes % ALIGNMENT_BYTES))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


class TensorFile:
    """A safetensors file, mapped: pages are read as they are used, and written to no file.

    Attributes:
        names: of its tensors.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            BrokenTensorFile: the header makes no sense, or the file is too short for it.
            OSError: it cannot be read.
        """
        self._path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin, header = _read_header(file, size)
            self._infos = {
                name: _checked(name, info, size - begin)
                for name, info in header.items()
                if name != "__metadata__" and not name.startswith(_PADDING)
            }
            _refuse_overlaps(self._infos)
            self._begin = begin
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.names = frozenset(self._infos)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._infos[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._infos[name].dtype

    def tensor(self, name: str, alignment_bytes: int = ALIGNMENT_BYTES) -> Tensor:
        """A tensor over the mapping, which it keeps, in a storage of its own.

        A copy where another program has put it at a place that is not so aligned.
        """
        dtype, shape, begin, end = self._infos[name]
        begin, end = self._begin + begin, self._begin + end
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=end - begin, offset=begin)
        if begin % max(alignment_bytes, dtype.itemsize):
            data = data.clone()
        return data.view(dtype).view(shape)

    def forget(self) -> None:
        """Let go of the memory that holds pages; they are read again when they are used."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _read_header(file: Any, size: int) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the header."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise BrokenTensorFile(f"has {size} bytes and states a header of {length}")
    try:
        header = json.loads(file.read(length).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenTensorFile(f"has a header that is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise BrokenTensorFile("has a header that is no JSON object")
    return 8 + length, header


class _Info(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # of its bytes, counted from the data's start
    end: int


def _checked(name: str, info: Any, data_bytes: int) -> _Info:
    """A tensor whose bytes are there."""
    if not isinstance(info, dict):
        raise BrokenTensorFile(f"describes tensor {name} by no JSON object")
    dtype = _DTYPES.get(info.get("dtype", "")) if isinstance(info.get("dtype"), str) else None
    shape: Any = info.get("shape")
    offsets: Any = info.get("data_offsets")
    if dtype is None:
        raise BrokenTensorFile(f"gives tensor {name} the unknown type {info.get('dtype')!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise BrokenTensorFile(f"gives tensor {name} the shape {shape} at {offsets}")
    begin, end = offsets
    if not begin <= end <= data_bytes or end - begin != math.prod(shape) * dtype.itemsize:
        raise BrokenTensorFile(
            f"has tensor {name} of the shape {shape} at bytes {begin} to {end} of {data_bytes}"
        )
    return _Info(dtype, tuple(shape), begin, end)


def _refuse_overlaps(infos: Mapping[str, _Info]) -> None:
    places = ((info.begin, info.end, name) for name, info in infos.items())
    filled = sorted(place for place in places if place[0] < place[1])
    for (_, end, one), (begin, _, other) in pairwise(filled):
        if begin < end:
            raise BrokenTensorFile(f"has tensors that overlap: {one} and {other}")


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
