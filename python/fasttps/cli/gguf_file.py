"""Whether a GGUF file is whole, before minutes are spent on reading it.

Walks the header alone, each length held against the bytes that are there, so that a file cut
short or with an absurd count is named for what it is and nothing is allocated for it.

Layout (all integers in the byte order of the version field):
    "GGUF", version u32, tensor count u64, pair count u64,
    pairs:   key string, type u32, value;  string = length u64, bytes;  array = type u32, count u64
    tensors: name string, dimension count u32, dimensions u64 each, type u32, offset u64
    padding to `general.alignment` (32), then the data that the offsets count from
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
STRING, ARRAY, UINT32 = 8, 9, 4
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class BrokenGguf(ValueError):
    """The file is not a GGUF file, or not a whole one."""


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def check_gguf(path: Path) -> None:
    """Walk the header of a GGUF file.

    Raises:
        BrokenGguf: a length, a count or a tensor reaches past the end of the file, or the file
            is of an unknown version.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise BrokenGguf("is too short to be a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).check()


class _Walk:
    """A position in the file and the checked steps that advance it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.order = "<"

    def check(self) -> None:
        if self.skip(len(MAGIC), "the magic") != MAGIC:
            raise BrokenGguf("does not begin with 'GGUF'")
        version = self.u32("the version")
        if version & 0xFFFF == 0:  # written on a big-endian machine
            self.order, self.at = ">", len(MAGIC)
            version = self.u32("the version")
        if version not in VERSIONS:
            raise BrokenGguf(f"is of GGUF version {version}; 2 and 3 are known")
        tensor_count, pair_count = self.u64("the tensor count"), self.u64("the pair count")
        alignment = 32
        for _ in range(pair_count):
            key = self.string("a key")
            kind = self.u32(f"the type of {key}")
            if key == "general.alignment" and kind == UINT32:
                alignment = self.u32(key)
            else:
                self.value(kind, key)
        if alignment == 0:
            raise BrokenGguf("states a general.alignment of 0")
        ends = {}
        for _ in range(tensor_count):
            name, end = self.tensor()
            ends[name] = end
        data_start = -(-self.at // alignment) * alignment
        for name, end in ends.items():
            if data_start + end > len(self.data):
                raise BrokenGguf(
                    f"is cut short: tensor {name} ends at byte {data_start + end}, "
                    f"the file has {len(self.data)}"
                )

    def tensor(self) -> tuple[str, int]:
        """Name of the next tensor, and where its data ends, counted from the data's start."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.string("a tensor's name")
        dimensions = self.u32(f"the dimension count of {name}")
        if dimensions > MAX_DIMENSIONS:
            raise BrokenGguf(f"gives tensor {name} {dimensions} dimensions; at most 4 are known")
        elements = 1
        for _ in range(dimensions):
            elements *= self.u64(f"the dimensions of {name}")
        kind = self.u32(f"the type of {name}")
        offset = self.u64(f"the offset of {name}")
        try:
            block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise BrokenGguf(f"gives tensor {name} the unknown type {kind}") from None
        return name, offset + -(-elements // block_elements) * block_bytes

    def value(self, kind: int, key: str, depth: int = 0) -> None:
        if kind == STRING:
            self.string(key)
        elif kind == ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise BrokenGguf(f"nests the arrays of {key} deeper than {MAX_ARRAY_DEPTH}")
            inner, count = self.u32(key), self.u64(key)
            if inner in VALUE_BYTES:
                self.skip(VALUE_BYTES[inner] * count, key)
            else:
                for _ in range(count):
                    self.value(inner, key, depth + 1)
        elif kind in VALUE_BYTES:
            self.skip(VALUE_BYTES[kind], key)
        else:
            raise BrokenGguf(f"gives {key} the unknown type {kind}")

    def string(self, what: str) -> str:
        return self.skip(self.u64(what), what).decode("utf-8", errors="replace")

    def u32(self, what: str) -> int:
        return int(struct.unpack(self.order + "I", self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack(self.order + "Q", self.skip(8, what))[0])

    def skip(self, length: int, what: str) -> bytes:
        """The next `length` bytes, which must be there."""
        if length > len(self.data) - self.at:
            raise BrokenGguf(
                f"is cut short: {what} needs {length} bytes at {self.at}, "
                f"the file has {len(self.data)}"
            )
        begin, self.at = self.at, self.at + length
        return self.data[begin : self.at]
