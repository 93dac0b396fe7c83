"""A GGUF file that is not whole is named for what it is, and nothing is allocated for it."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from fasttps.gguf.header import BrokenGguf, is_gguf, read_header  # noqa: E402

F32, Q4_1, STRING, ARRAY, UINT32 = 0, 3, 8, 9, 4
DATA_BYTES = 64


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(dimensions: Iterable[int], kind: int = F32, offset: int = 0, name: str = "a") -> bytes:
    sizes = list(dimensions)
    packed = b"".join(struct.pack("<Q", size) for size in sizes)
    return text(name) + struct.pack("<I", len(sizes)) + packed + struct.pack("<IQ", kind, offset)


def header(pairs: Iterable[bytes] = (), tensors: Iterable[bytes] = (), version: int = 3) -> bytes:
    pairs, tensors = list(pairs), list(tensors)
    counts = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(pairs))
    return counts + b"".join(pairs) + b"".join(tensors)


def whole(head: bytes, alignment: int = 32) -> bytes:
    return head + bytes(-len(head) % alignment) + bytes(DATA_BYTES)


def alignment_pair(value: int) -> bytes:
    return text("general.alignment") + struct.pack("<II", UINT32, value)


def array_pair(kind: int, count: int) -> bytes:
    return text("k") + struct.pack("<IIQ", ARRAY, kind, count)


WHOLE = {
    "no tensors": whole(header()),
    "a tensor that fills the data": whole(header(tensors=[tensor([DATA_BYTES // 4])])),
    "alignment 16": whole(header([alignment_pair(16)], [tensor([4], offset=48)]), alignment=16),
    "alignment 64": whole(header([alignment_pair(64)], [tensor([4], offset=48)]), alignment=64),
    "a block type": whole(header(tensors=[tensor([64], kind=Q4_1)])),
    "version 2": whole(header(version=2)),
}

BROKEN = {
    "empty": (b"", "too short"),
    "other magic": (b"GGML" + bytes(60), "does not begin with 'GGUF'"),
    "version 1": (whole(header(version=1)), "version 1"),
    "version 2^15": (whole(header(version=1 << 15)), "version 32768"),
    "2^60 tensors": (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0) + bytes(9), "cut short"),
    "2^62 pairs": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 62) + bytes(9), "cut short"),
    "string of 2^63 bytes": (header([struct.pack("<Q", 1 << 63)]) + bytes(64), "cut short"),
    "array of 2^62 numbers": (whole(header([array_pair(UINT32, 1 << 62)])), "cut short"),
    "array of 2^62 strings": (whole(header([array_pair(STRING, 1 << 62)])), "cut short"),
    "array of 2^62 arrays": (
        whole(header([array_pair(ARRAY, 1 << 62) + struct.pack("<IQ", UINT32, 0)])),
        "unknown type|cut short|deeper",
    ),
    "two tensors of one name": (whole(header(tensors=[tensor([4]), tensor([4])])), "two tensors a"),
    "two pairs of one key": (
        whole(header([text("k") + struct.pack("<II", UINT32, 1)] * 2)),
        "two pairs k",
    ),
    "tensors that overlap": (
        whole(header(tensors=[tensor([8]), tensor([8], offset=16, name="b")])),
        "overlap: a and b",
    ),
    "a tensor within another": (
        whole(header(tensors=[tensor([4], offset=8, name="b"), tensor([16])])),
        "overlap: a and b",
    ),
    "rows of half a block": (whole(header(tensors=[tensor([16], kind=Q4_1)])), "blocks of 32"),
    "arrays nested without end": (
        whole(header([array_pair(ARRAY, 1) + struct.pack("<IQ", ARRAY, 1) * 2000])),
        "deeper than 4",
    ),
    "unknown value type": (whole(header([text("k") + struct.pack("<I", 99)])), "type 99"),
    "unknown tensor type": (whole(header(tensors=[tensor([4], kind=200)])), "type 200"),
    "five dimensions": (whole(header(tensors=[tensor([1] * 5)])), "5 dimensions"),
    "alignment 0": (whole(header([alignment_pair(0)])), "alignment of 0"),
    # The element counts of these wrap to 0 or to little in 64 bits.
    "dimensions 2^62 x 4": (whole(header(tensors=[tensor([1 << 62, 4])])), "cut short: tensor a"),
    "dimensions 2^61 x 8": (whole(header(tensors=[tensor([1 << 61, 8])])), "cut short: tensor a"),
    "dimension 2^64-1": (whole(header(tensors=[tensor([(1 << 64) - 1])])), "cut short: tensor a"),
    "dimensions 2^64-1 x 2": (
        whole(header(tensors=[tensor([(1 << 64) - 1, 2])])),
        "cut short: tensor a",
    ),
    "offset 2^40": (whole(header(tensors=[tensor([4], offset=1 << 40)])), "cut short: tensor a"),
    "offset that wraps": (
        whole(header(tensors=[tensor([4], offset=(1 << 64) - 16)])),
        "cut short: tensor a",
    ),
    "eight bytes short": (
        whole(header(tensors=[tensor([DATA_BYTES // 4])]))[:-8],
        "cut short: tensor a",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_passes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(WHOLE[name])
    assert is_gguf(path)
    read_header(path)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_for_what_it_is(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BrokenGguf, match=message):
        read_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 1024


@pytest.mark.parametrize("alignment", [16, 64])
def test_the_data_begin_where_the_alignment_says(tmp_path: Path, alignment: int) -> None:
    """For every length of the metadata; a reader that rounds to 32 takes a tensor's neighbour."""
    from fasttps.gguf.tensors import read_bytes

    path = tmp_path / "model.gguf"
    numbers = [struct.pack("<4f", *range(at, at + 4)) for at in (0, 4)]
    for length in range(2 * alignment):
        pairs = [
            alignment_pair(alignment),
            text("pad") + struct.pack("<I", STRING) + text("x" * length),
        ]
        tensors = [tensor([4], name="a"), tensor([4], offset=alignment, name="b")]
        head = header(pairs, tensors)
        data = b"".join(one.ljust(alignment, b"\0") for one in numbers)
        path.write_bytes(head + bytes(-len(head) % alignment) + data)
        infos = read_header(path).tensors
        for name, expected in zip("ab", numbers):
            info = infos[name]
            assert read_bytes(path, info).numpy().tobytes() == expected


def test_what_a_file_calls_things_does_not_break_the_line(tmp_path: Path) -> None:
    name = "a\nb\x1b[31m" + "c" * 1000
    path = tmp_path / "model.gguf"
    path.write_bytes(whole(header(tensors=[tensor([4], kind=200, name=name)])))
    with pytest.raises(BrokenGguf, match=r"gives tensor a b \[31mc+…$"):
        read_header(path)


def test_a_file_cut_anywhere_is_cut_short(tmp_path: Path) -> None:
    pairs = [text("name") + struct.pack("<I", STRING) + text("tiny"), array_pair(UINT32, 0)]
    content = whole(header(pairs, [tensor([8], name="a"), tensor([8], offset=32, name="b")]))
    path = tmp_path / "model.gguf"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(BrokenGguf, match=r"cut short|too short"):
            read_header(path)


def test_a_big_endian_file_passes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    numbers = b"".join(
        (
            struct.pack(">Q", 1) + b"k",
            struct.pack(">IIQ", ARRAY, UINT32, 2),
            struct.pack(">II", 1, 1 << 24),
        )
    )
    path.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 1) + numbers)
    read = read_header(path)
    assert list(read.metadata["k"]) == [1, 1 << 24]
    assert read.byte_order == "big"


def test_what_a_header_says(tmp_path: Path) -> None:
    pairs = [
        text("name") + struct.pack("<I", STRING) + text("tiny"),
        text("yes") + struct.pack("<IB", 7, 1),
        text("half") + struct.pack("<If", 6, 0.5),
        array_pair(UINT32, 2) + struct.pack("<II", 3, 4),
        text("words") + struct.pack("<IIQ", ARRAY, STRING, 2) + text("a") + text("é"),
        alignment_pair(16),
    ]
    tensors = [tensor([4], name="a"), tensor([32, 1], kind=Q4_1, offset=16, name="b")]
    head = header(pairs, tensors)
    path = tmp_path / "model.gguf"
    path.write_bytes(whole(head, alignment=16))
    read = read_header(path)
    assert read.metadata["name"] == "tiny"
    assert read.metadata["yes"] is True
    assert read.metadata["half"] == 0.5
    assert list(read.metadata["k"]) == [3, 4]
    assert read.metadata["words"] == ["a", "é"]
    start = -(-len(head) // 16) * 16
    assert (read.tensors["a"].begin, read.tensors["a"].end) == (start, start + 16)
    b = read.tensors["b"]
    assert (b.shape, b.type_name, b.begin, b.end) == ((1, 32), "Q4_1", start + 16, start + 36)
