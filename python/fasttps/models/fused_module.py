"""The class of a module while it is patched. Knows nn.Module alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from fasttps.models.patch_options import Options

# The weight of a submodule ("" is the module itself) as the source of the model has it.
ReadOriginal = Callable[[str], torch.Tensor]


class PatchError(RuntimeError):
    """The model cannot be patched, or a patch not undone; nothing was changed."""


class FusedModule(nn.Module):
    """The class of a module while it is patched: a subclass of `replaces`, importable by name.

    Attributes:
        replaces: the class that it takes the place of, exactly that one.
        part: "attention" or "mlp": the argument of `patch` that leaves it out. A class that
            serves several parts has none of its own.
        op: the ops that it runs, for the report.
    """

    replaces: ClassVar[type[nn.Module]]
    part: ClassVar[str]
    op: ClassVar[str]

    @classmethod
    def obstacle(cls, module: nn.Module, shared: frozenset[int]) -> str | None:
        """Why `module`, a `replaces`, cannot be fused; None if it can. Changes nothing.

        shared: the data_ptr of every tensor that several places of the model use.
        """
        return None

    @classmethod
    def weight_names(cls) -> tuple[str, ...]:
        """The submodules whose weights are packed; "" is the module itself."""
        return ()

    def fuse(self, options: Options, **arguments: Any) -> None:
        """Make ready to run; raises having changed nothing. The class is set already."""

    def unfuse(self, read: ReadOriginal | None = None) -> None:
        """Take back what `fuse` did. The class is still ours.

        Bit for bit, but for the `lossy` weights: those are what `read` gives, or without it what
        the packed ones hold.
        """

    @property
    def formats(self) -> str | None:
        """What the weights are packed as."""
        return None

    @property
    def inexact(self) -> bool:
        """Whether the packed weights stand for others than those that were packed."""
        return False

    @property
    def lossy(self) -> tuple[str, ...]:
        """Names of the weights of which no original is kept and whose packed form is not exact."""
        return ()

    @property
    def lost(self) -> tuple[str, ...]:
        """Those of them that came after the patch, so that no source has them either."""
        return ()

    def shape_of(self, name: str) -> tuple[int, int]:
        """[rows, cols] of a packed weight."""
        raise KeyError(name)

    def refuse_gradient(self, *tensors: torch.Tensor | None) -> None:
        """Raise RuntimeError in training mode, or where a gradient is asked for."""
        if self.training:
            raise RuntimeError(
                f"{type(self).__name__}: a patched model is for inference, got training mode; "
                "undo the patch to train"
            )
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            raise RuntimeError(
                f"{type(self).__name__}: a gradient is asked for, and a patched model is for "
                "inference only: call it under torch.no_grad() or torch.inference_mode(), or "
                "undo the patch"
            )
