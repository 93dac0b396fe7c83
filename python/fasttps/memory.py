"""Memory for what is streamed through again and again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttps import _C


def empty_in_huge_pages(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """As torch.empty; on the CPU in pages of 2 MiB where Linux gives them.

    Reading it misses the TLB less: decode attention over a long cache gains up to a seventh.
    """
    memory = torch.empty(tuple(shape), dtype=dtype, device=device)
    if type(memory) is Tensor and memory.device.type == "cpu":  # a FakeTensor has no address
        _C.prefer_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory
