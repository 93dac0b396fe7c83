"""Text from tokens as they come, and the strings that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder gives for a part of a character


class TextStream:
    """Text of tokens that come one by one; joined, it is the text of all of them.

    Only the last few tokens are decoded each time: those of the last piece, by which a decoder
    knows whether a space belongs before, and those after it.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._last: list[int] = []  # tokens of the last piece
        self._next: list[int] = []  # tokens after it, whose text is not whole yet

    def push(self, token_id: int) -> str:
        """The text that is whole with this token; empty within a character of several tokens."""
        self._next.append(token_id)
        return self._piece(whole=False)

    def finish(self) -> str:
        """What is left, whole or not."""
        return self._piece(whole=True)

    def _piece(self, whole: bool) -> str:
        before = self._decode(self._last)
        text = self._decode(self._last + self._next)
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not whole):
            return ""
        self._last, self._next = self._next, []
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopStrings:
    """Whether one of several strings has appeared in the text of a growing sequence."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._kept = max(map(len, self._strings)) - 1  # a string may begin in an earlier piece
        self._stream = TextStream(tokenizer, skip_special_tokens=False)
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Whether the text that ends with this token holds one of the strings."""
        piece = self._stream.push(token_id)
        if not piece:
            return False
        text = self._tail + piece
        self._tail = text[-self._kept :] if self._kept else ""
        return any(string in text for string in self._strings)
