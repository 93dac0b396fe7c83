"""A layer of a StaticKVCache that keeps only its window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttps.kv_cache.layer import StaticKVLayer
from fasttps.kv_cache.steps import Steps


class SlidingKVLayer(StaticKVLayer):
    """A ring of slots: position p lies in slot p mod slots, until slots positions later.

    There are `spare_slots` more than the window has tokens: so many can be taken back (`crop`), and
    one more can come at once; what comes at once and is more is taken piece by piece.
    """

    is_sliding = True

    def __init__(
        self,
        max_seq_len: int,
        steps: Steps,
        index: int,
        dtype: torch.dtype | None,
        *,
        window: int,
        spare_slots: int,
    ) -> None:
        super().__init__(max_seq_len, steps, index, dtype)
        self.window = window
        self.spare_slots = spare_slots
        with torch.inference_mode(False):
            self._highest = torch.zeros((), dtype=torch.int64)  # tokens up to which it was written

    @property
    def slots(self) -> int:
        return self.window + self.spare_slots

    @property
    def piece(self) -> int:
        """Tokens that an op takes at once: the first one's window is still there at the last."""
        return self.spare_slots + 1

    @property
    def kind(self) -> str:
        return f"{super().kind}, window {self.window}, spare_slots {self.spare_slots}"

    def reserve(self, key: Tensor, value: Tensor) -> Tensor:
        """As of every layer, and raises ValueError where tokens of the window are lost."""
        seq_lens = super().reserve(key, value)
        if torch.compiler.is_compiling():
            end = seq_lens.max() + key.size(1)
            before = self._highest * (seq_lens.max() > 0)  # an empty layer begins anew
            self._highest.copy_(torch.maximum(before, end))
        else:
            self.begin(key.size(1))
        return seq_lens

    def begin(self, new_tokens: int) -> None:
        """So many tokens are about to be written."""
        self._check_intact(self.steps.shortest, "a step after one that was broken off")
        filled = self.filled
        before = int(self._highest) if filled > 0 else 0
        self._highest.fill_(max(before, filled + new_tokens))

    def takes_step(self, window: int, new_tokens: int) -> bool:
        return 0 < window <= self.window and new_tokens <= self.piece

    def check_crop(self, length: int) -> None:
        self._check_intact(length, f"crop to {length} tokens")

    def _check_intact(self, length: int, what: str) -> None:
        oldest = int(self._highest) - self.slots
        if length > 0 and max(0, length - self.window + 1) < oldest:
            raise ValueError(
                f"StaticKVCache: {what} wanted the {self.window} tokens of a sliding layer before "
                f"{length}, got those from {oldest} on: it keeps spare_slots = {self.spare_slots} "
                "more than its window; reset() it, or make one with more spare_slots"
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append rotated keys and values [batch, num_kv_heads, new_tokens, head_dim].

        Returns:
            Those of the new tokens and of up to window - 1 before them, by position, as
            `get_mask_sizes` says.
        """
        if torch.compiler.is_compiling():
            raise ValueError(
                "StaticKVCache: within torch.compile a sliding layer wanted a patched attention; "
                "patch the model, or use another cache"
            )
        dtype = key_states.dtype
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        seq_lens = self.reserve(key, value)
        if self.steps.differ:
            raise ValueError(
                "StaticKVCache: sequences of several lengths want a patched attention here"
            )
        start, end = self.filled, self.filled + key.size(1)
        pieces = [self._positions(max(0, start - self.window + 1), start, dtype)]
        for first in range(start, end, self.piece):
            at, last = first - start, min(first + self.piece, end)
            rows = slice(at, last - start)
            self._write(key[:, rows], value[:, rows], seq_lens + at, ring=True)
            pieces.append(self._positions(first, last, dtype))
        self.advance(key.size(1))
        keys, values = zip(*pieces)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def _positions(self, begin: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of these positions."""
        slots = torch.arange(begin, end, device=self.device) % self.slots

        def rows(buffer: Any, scale: Tensor | None) -> Tensor:
            chosen = buffer.index_select(2, slots)
            if scale is not None:
                chosen = chosen * scale.index_select(2, slots).unsqueeze(-1)
            return chosen.to(dtype)

        return rows(self.keys, self.k_scale), rows(self.values, self.v_scale)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        keys, _ = super().get_mask_sizes(query_length)
        if torch.compiler.is_compiling():
            return keys, 0
        first = max(0, self.filled - self.window + 1)
        return keys - first, first

    def slots_of_mask(self, mask: Tensor, end: Any, total: Any) -> Tensor:
        """A mask over positions as one over slots, [..., slots].

        mask: [..., keys], whose last key is that of position total - 1, within a graph that of
            position max_seq_len - 1.
        end: tokens in the layer once the op has run, an int or a tensor.
        """
        slot = torch.arange(self.slots, device=mask.device)
        position = end - 1 - (end - 1 - slot) % self.slots
        covered = self.max_seq_len if torch.compiler.is_compiling() else total
        column = position - (covered - mask.size(-1))
        return mask.index_select(-1, column.clamp(0, mask.size(-1) - 1))

    def restore(self, rows: list[Tensor], key_dtype: torch.dtype, length: int) -> None:
        super().restore(rows, key_dtype, length)
        self._highest.fill_(length)

    def grow(self, max_seq_len: int) -> None:
        """The window needs no more memory."""
        self.max_seq_len = self.max_cache_len = max_seq_len
