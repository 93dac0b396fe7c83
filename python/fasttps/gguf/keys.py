"""Metadata of a GGUF file under a prefix, checked as they are read.

llama.cpp's keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from array import array
from typing import Any

from fasttps.gguf.header import BrokenGguf, UnsupportedGguf


class Keys:
    """Metadata under a prefix."""

    def __init__(self, metadata: dict[str, Any], prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._metadata

    def get(self, key: str, *default: Any) -> Any:
        """A number or a string; of an array of equal ones (one a layer), that one."""
        value = self._metadata.get(self._prefix + key)
        if value is None:
            if not default:
                raise BrokenGguf(f"lacks {self._prefix}{key}")
            return default[0]
        if isinstance(value, (array, list)):
            if not value or any(other != value[0] for other in value):
                raise UnsupportedGguf(f"has {self._prefix}{key} that differs between layers")
            value = value[0]
        return value

    def count(self, key: str, *default: int) -> int:
        """A number of things, of which there is at least one."""
        return self._checked_count(key, self.get(key, *default), least=1)

    def optional_count(self, key: str) -> int | None:
        """A count; None where it is 0 or not stated."""
        return self._checked_count(key, self.get(key, 0), least=0) or None

    def per_layer(self, key: str, layers: int) -> list[int]:
        """A count for each layer, which may be 0; one that is stated once is that of all."""
        value = self._metadata.get(self._prefix + key)
        counts = list(value) if isinstance(value, (array, list)) else [self.get(key)] * layers
        if len(counts) != layers:
            raise BrokenGguf(f"has {self._prefix}{key} of {len(counts)} layers, and has {layers}")
        return [self._checked_count(key, one, least=0) for one in counts]

    def number(self, key: str, *default: float) -> float:
        """A finite number."""
        value = self.get(key, *default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BrokenGguf(f"has {self._prefix}{key} = {value!r}")
        if not math.isfinite(value):
            raise BrokenGguf(f"has {self._prefix}{key} = {value}")
        return float(value)

    def positive(self, key: str, *default: float) -> float:
        """A finite number above 0."""
        value = self.number(key, *default)
        if value <= 0:
            raise BrokenGguf(f"has {self._prefix}{key} = {value}")
        return value

    def token(self, key: str, vocab_size: int) -> int | None:
        """The id of a token; None where there is none."""
        value = self.get(key, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise BrokenGguf(f"has {self._prefix}{key} = {value!r} and {vocab_size} tokens")
        return value

    def refuse(self, *keys: str) -> None:
        """Raise UnsupportedGguf where one of these is stated, and not as 0."""
        for key in keys:
            if value := self.get(key, 0):
                raise UnsupportedGguf(f"has {self._prefix}{key} = {value}")

    def _checked_count(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise BrokenGguf(f"has {self._prefix}{key} = {value!r}")
        return value
