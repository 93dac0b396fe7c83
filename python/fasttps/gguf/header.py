"""The header of a GGUF file: its metadata, and where its tensors lie.

Each length is held against the bytes that are there, so that a file cut short or with an absurd
count is named for what it is and nothing is allocated for it.

Layout (all integers in the byte order of the version field):
    "GGUF", version u32, tensor count u64, pair count u64,
    pairs:   key string, type u32, value;  string = length u64, bytes;  array = type u32, count u64
    tensors: name string, dimension count u32, dimensions u64 each, type u32, offset u64
    padding to `general.alignment` (32), then the data that the offsets count from
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fasttps.messages import OneLineError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
STRING, ARRAY, UINT32, BOOL = 8, 9, 4, 7
# Type of a value: its letter for struct and array.
LETTERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}


class BrokenGguf(OneLineError):
    """The file is not a GGUF file, or not a whole one."""


class UnsupportedGguf(OneLineError):
    """A whole file of a model that is not read here."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        shape: as torch has it: the dimension whose elements lie side by side is the last.
        kind: ggml's number of its type.
        begin, end: bytes of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int
    end: int

    @property
    def type_name(self) -> str:
        from gguf.constants import GGMLQuantizationType

        return GGMLQuantizationType(self.kind).name


@dataclass(frozen=True)
class Header:
    """What a file says of itself. Arrays of numbers are `array.array`, others lists."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    byte_order: str

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file, and check that the file is whole.

    Raises:
        BrokenGguf: a length, a count or a tensor reaches past the end of the file, or the file
            is of an unknown version.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise BrokenGguf("is too short to be a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(data).header()


class _Walk:
    """A position in the file and the checked steps that advance it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0
        self.order = "little"
        self.set_order("little")

    def set_order(self, order: str) -> None:
        self.order = order
        mark = "<" if order == "little" else ">"
        self.formats = {kind: struct.Struct(mark + letter) for kind, letter in LETTERS.items()}
        self.u32_format, self.u64_format = self.formats[UINT32], self.formats[10]

    def header(self) -> Header:
        if self.skip(len(MAGIC), "the magic") != MAGIC:
            raise BrokenGguf("does not begin with 'GGUF'")
        version = self.u32("the version")
        if version & 0xFFFF == 0:  # written on a big-endian machine
            self.set_order("big")
            self.at = len(MAGIC)
            version = self.u32("the version")
        if version not in VERSIONS:
            raise BrokenGguf(f"is of GGUF version {version}; 2 and 3 are known")
        tensor_count, pair_count = self.u64("the tensor count"), self.u64("the pair count")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string("a key")
            if key in metadata:
                raise BrokenGguf(f"has two pairs {key}")
            kind = self.u32(f"the type of {key}")
            metadata[key] = self.value(kind, key)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise BrokenGguf(f"states a general.alignment of {alignment}")
        tensors: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            tensor = self.tensor()
            if tensor.name in tensors:
                raise BrokenGguf(f"has two tensors {tensor.name}")
            tensors[tensor.name] = tensor
        start = -(-self.at // alignment) * alignment
        placed = {name: self.placed(tensor, start) for name, tensor in tensors.items()}
        _refuse_overlaps(placed.values())
        return Header(metadata, placed, self.order)

    def placed(self, tensor: TensorInfo, start: int) -> TensorInfo:
        """The tensor with its bytes counted from the start of the file."""
        begin, end = start + tensor.begin, start + tensor.end
        if end > self.size:
            raise BrokenGguf(
                f"is cut short: tensor {tensor.name} ends at byte {end}, the file has {self.size}"
            )
        return TensorInfo(tensor.name, tensor.shape, tensor.kind, begin, end)

    def tensor(self) -> TensorInfo:
        """The next tensor, its bytes counted from the start of the data."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.string("a tensor's name")
        count = self.u32(f"the dimension count of {name}")
        if count > MAX_DIMENSIONS:
            raise BrokenGguf(f"gives tensor {name} {count} dimensions; at most 4 are known")
        dimensions = [self.u64(f"the dimensions of {name}") for _ in range(count)]
        elements = 1
        for size in dimensions:
            elements *= size
        kind = self.u32(f"the type of {name}")
        offset = self.u64(f"the offset of {name}")
        try:
            block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise BrokenGguf(f"gives tensor {name} the unknown type {kind}") from None
        if dimensions and dimensions[0] % block_elements:
            raise BrokenGguf(
                f"gives tensor {name} rows of {dimensions[0]} elements, "
                f"which is not a multiple of its blocks of {block_elements}"
            )
        size_bytes = -(-elements // block_elements) * block_bytes
        return TensorInfo(name, tuple(reversed(dimensions)), kind, offset, offset + size_bytes)

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise BrokenGguf(f"nests the arrays of {key} deeper than {MAX_ARRAY_DEPTH}")
            return self.array(key, depth)
        if kind not in LETTERS:
            raise BrokenGguf(f"gives {key} the unknown type {kind}")
        form = self.formats[kind]
        (value,) = form.unpack(self.skip(form.size, key))
        return bool(value) if kind == BOOL else value

    def array(self, key: str, depth: int) -> Any:
        inner, count = self.u32(key), self.u64(key)
        if inner == STRING:
            return self.strings(count, key)
        if inner not in LETTERS:
            return [self.value(inner, key, depth + 1) for _ in range(count)]
        numbers = array(LETTERS[inner])
        numbers.frombytes(self.skip(self.formats[inner].size * count, key))
        if self.order != sys.byteorder:
            numbers.byteswap()
        return numbers

    def strings(self, count: int, what: str) -> list[str]:
        """`string` so many times: a vocabulary has a hundred thousand."""
        found, data, size, unpack = [], self.data, self.size, self.u64_format.unpack_from
        for _ in range(count):
            begin = self.at + 8
            end = begin + unpack(data, self.at)[0] if begin <= size else size + 1
            if end > size:
                self.string(what)  # raises
            found.append(data[begin:end].decode("utf-8", errors="replace"))
            self.at = end
        return found

    def string(self, what: str) -> str:
        return self.skip(self.u64(what), what).decode("utf-8", errors="replace")

    def u32(self, what: str) -> int:
        return int(self.u32_format.unpack(self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(self.u64_format.unpack(self.skip(8, what))[0])

    def skip(self, length: int, what: str) -> bytes:
        """The next `length` bytes, which must be there."""
        begin, end = self.at, self.at + length
        if end > self.size:
            raise BrokenGguf(
                f"is cut short: {what} needs {length} bytes at {begin}, the file has {self.size}"
            )
        self.at = end
        return self.data[begin:end]


def _refuse_overlaps(tensors: Iterable[TensorInfo]) -> None:
    filled = sorted((t for t in tensors if t.begin < t.end), key=lambda t: t.begin)
    for one, other in pairwise(filled):
        if other.begin < one.end:
            raise BrokenGguf(f"has tensors that overlap: {one.name} and {other.name}")
