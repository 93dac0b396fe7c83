"""cos and sin of a model for every position, as its own rotary modules compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROWS = 1024  # the table grows by so many positions

# The kinds of transformers' RoPE whose angles depend on the position alone.
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
# And one of which they also depend on whether a length is passed.
LONGROPE = "longrope"

Angles = Callable[[Tensor], Sequence[tuple[Tensor, Tensor]]]


def rope_obstacle(rotaries: Sequence[Any]) -> str | None:
    """Why there can be no table."""
    for rotary in rotaries:
        kinds = getattr(rotary, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if len(rotaries) > 1 or len(kinds) > 1:
            kinds.discard(None)
        known = STATIC_ROPE | {LONGROPE} if len(rotaries) == len(kinds) == 1 else STATIC_ROPE
        for kind in kinds - known:
            return f"RoPE of type {kind} changes with the length"
    return None


class RopeTable:
    """cos and sin [tables, 1, rows, rotary_dim]; of one table [1, rows, rotary_dim].

    Attributes:
        rows: positions that it has.
        limit: of longrope, the length past which a second set of angles holds; else None.
    """

    def __init__(
        self, rotaries: Sequence[Any], angles: Angles, dtype: torch.dtype, rows: int
    ) -> None:
        """
        Args:
            rotaries: the modules that compute the angles.
            angles: of position_ids [1, tokens], a pair (cos, sin) for each table, as the ops take
                them.
        """
        self.rows = -(-rows // ROWS) * ROWS
        self._rotaries, self._dtype = tuple(rotaries), dtype
        self.limit = _limit(rotaries[0])
        self._state = _state(rotaries)
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(self.rows)[None]
            first = positions if self.limit is None else positions[:, : self.limit]
            self._cos, self._sin = _stack(angles(first))
            if self.limit is not None and self.rows > self.limit:
                self._long = _stack(angles(positions))

    def serves(self, rotaries: Sequence[Any], dtype: torch.dtype) -> bool:
        """Whether the table is that of these modules as they are now."""
        return (
            len(rotaries) == len(self._rotaries)
            and all(one is other for one, other in zip(rotaries, self._rotaries))
            and dtype == self._dtype
            and _state(rotaries) == self._state
        )

    def of(self, last: int) -> tuple[Tensor, Tensor]:
        """cos and sin for tokens up to position `last`."""
        if self.limit is not None and last >= self.limit:
            return self._long
        return self._cos, self._sin


def _stack(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    cos, sin = zip(*pairs)
    return torch.stack(cos), torch.stack(sin)


def _limit(rotary: Any) -> int | None:
    if getattr(rotary, "rope_type", None) != LONGROPE:
        return None
    config = rotary.config
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("original_max_position_embeddings") or (
        config.original_max_position_embeddings
    )


def _state(rotaries: Sequence[Any]) -> list[Any]:
    """What changes with the values of rotary modules, but for inference tensors' own.

    longrope writes the angles that it chose into `inv_freq` in every forward.
    """
    found: list[Any] = []
    for rotary in rotaries:
        chosen = getattr(rotary, "rope_type", None) == LONGROPE
        for name, buffer in rotary._buffers.items():
            if buffer is None or (chosen and name == "inv_freq"):
                continue
            version = 0 if buffer.is_inference() else buffer._version
            found.append((name, buffer.data_ptr(), version))
        found += [
            (name, value)
            for name, value in vars(rotary).items()
            if name.endswith("attention_scaling")
        ]
    return found
