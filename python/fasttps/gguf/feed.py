"""Rows of tensors, read by another thread while those before them are packed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from fasttps.gguf.tensors import Tensors, open_file

PIECE_BYTES = 1 << 20
PANEL_ROWS = 16


class Piece(NamedTuple):
    """Rows of a parameter that are read and packed at once."""

    parameter: str
    begin: int
    end: int


def pieces(tensors: Tensors, parameter: str, begin: int, end: int) -> Iterator[Piece]:
    """Rows of a parameter in pieces of whole panels, and of whole heads where their rows move."""
    place = tensors.places[parameter]
    unit = math.lcm(PANEL_ROWS, place.shape[0] // place.heads) if place.heads else PANEL_ROWS
    step = max(1, PIECE_BYTES // (place.row_bytes * unit)) * unit
    for at in range(begin, end, step):
        yield Piece(parameter, at, min(at + step, end))


class Feed:
    """The bytes of pieces in the order in which they will be asked for, one read ahead.

    What `take` gives holds until the second call after it.
    """

    def __init__(self, tensors: Tensors, order: Iterable[Piece]) -> None:
        order = list(order)
        size = max((self._bytes(tensors, piece) for piece in order), default=0)
        self._tensors = tensors
        self._order = iter(order)
        self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        # One file for all, since the system reads ahead in an open file.
        self._file = open_file(tensors.path)
        self._pool = ThreadPoolExecutor(1)
        self._next: tuple[Piece, Future[Tensor]] | None = None
        self._read_on()

    def take(self, piece: Piece) -> Tensor:
        """The bytes [rows, bytes of a row] of the next piece, or of another one."""
        if self._next is None or self._next[0] != piece:
            return self._tensors.rows(*piece)
        found = self._next[1].result()
        self._read_on()
        return found

    def _read_on(self) -> None:
        piece = next(self._order, None)
        self._next = None
        if piece is not None:
            self._buffers.reverse()
            into = self._buffers[0][: self._bytes(self._tensors, piece)]
            self._next = piece, self._pool.submit(self._tensors.rows, *piece, into, self._file)

    @staticmethod
    def _bytes(tensors: Tensors, piece: Piece) -> int:
        return (piece.end - piece.begin) * tensors.places[piece.parameter].row_bytes

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._file.close()
