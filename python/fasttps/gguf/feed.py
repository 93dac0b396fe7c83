"""Rows of tensors, read by another thread while those before them are packed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from fasttps.gguf.tensors import Tensors, open_file

PIECE_BYTES = 1 << 20
PANEL_ROWS = 16
# Pieces under way at once: enough that the reader seldom waits for the packing of one.
AHEAD = 8


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
    """The bytes of pieces in the order in which they will be asked for, some read ahead.

    What `take` gives holds until the next call. Inside `with`, torch has a thread less than before:
    a team one of whose threads waits for the core that the reader has is slower than a smaller one.
    """

    def __init__(self, tensors: Tensors, order: Iterable[Piece]) -> None:
        order = list(order)
        size = max((self._bytes(tensors, piece) for piece in order), default=0)
        self._tensors = tensors
        self._order = iter(order)
        # One file for all, since the system reads ahead in an open file.
        self._file = open_file(tensors.path)
        self._pool = ThreadPoolExecutor(1)
        # Of the pieces that were asked to be read, the next to be taken first.
        self._read: deque[tuple[Piece, Tensor, Future[Tensor]]] = deque()
        self._taken: Tensor | None = None
        for _ in range(AHEAD):
            self._read_on(torch.empty(size, dtype=torch.uint8))

    def take(self, piece: Piece) -> Tensor:
        """The bytes [rows, bytes of a row] of the next piece, or of another one."""
        if not self._read or self._read[0][0] != piece:
            return self._tensors.rows(*piece)
        if self._taken is not None:
            self._read_on(self._taken)
        _, self._taken, found = self._read.popleft()
        return found.result()

    def _read_on(self, buffer: Tensor) -> None:
        piece = next(self._order, None)
        if piece is not None:
            into = buffer[: self._bytes(self._tensors, piece)]
            found = self._pool.submit(self._tensors.rows, *piece, into, self._file)
            self._read.append((piece, buffer, found))

    @staticmethod
    def _bytes(tensors: Tensors, piece: Piece) -> int:
        return (piece.end - piece.begin) * tensors.places[piece.parameter].row_bytes

    def __enter__(self) -> Feed:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(max(1, self._threads - 1))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.set_num_threads(self._threads)
        self._pool.shutdown(cancel_futures=True)
        self._file.close()
