"""How many tokens the layers of a cache hold."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes


class Steps:
    """The lengths of a cache as the ops take them: one int64 tensor for all layers.

    A tensor, so that a compiled model is one graph however far it goes. A step takes the layers one
    by one, and its last one moves the tensor on: a step that is broken off (Ctrl-C) leaves it where
    all layers are, and what it wrote counts for nothing.

    Attributes:
        seq_lens: [], or [batch] where the sequences differ.
    """

    def __init__(self, last_layer: int) -> None:
        self._last_layer = last_layer
        with torch.inference_mode(False):
            self.seq_lens = torch.zeros((), dtype=torch.int64)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return _value(self.seq_lens) if self.seq_lens.dim() == 0 else int(self.seq_lens.max())

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sequence."""
        return _value(self.seq_lens) if self.seq_lens.dim() == 0 else int(self.seq_lens.min())

    @property
    def differ(self) -> bool:
        """Whether the sequences have lengths of their own."""
        return self.seq_lens.dim() > 0

    def advance(self, layer: int, new_tokens: int) -> None:
        """`layer` holds `new_tokens` more; if it is the last one, then all do."""
        if layer == self._last_layer:
            self.seq_lens.add_(new_tokens)

    def set(self, length: int) -> None:
        """Every sequence has `length` tokens."""
        if self.differ:
            self.replace(torch.tensor(length))
        else:
            self.seq_lens.fill_(length)

    def replace(self, seq_lens: Tensor) -> None:
        with torch.inference_mode(False):
            self.seq_lens = seq_lens.to(self.seq_lens.device, torch.int64, copy=True)

    def move(self, device: torch.device) -> None:
        if self.seq_lens.device != device:
            with torch.inference_mode(False):
                self.seq_lens = self.seq_lens.to(device)


def _value(scalar: Tensor) -> int:
    """That of a tensor, also where a mode makes fake ones of all."""
    try:
        return int(scalar)
    except DataDependentOutputException:
        with _disable_current_modes():
            return int(scalar)
