"""What a plan for a whole model rests on, watched between two tokens. Knows nn.Module alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fasttps import _C
from fasttps.models.packed_module import PackedModule


def hooks_below(model: nn.Module) -> list[dict[Any, Any]]:
    """The hooks of each module within `model`, as torch keeps them."""
    below = [m for m in model.modules() if m is not model]
    return [d for m in below for d in (m._forward_hooks, m._forward_pre_hooks)]


def own_forward(model: nn.Module) -> str | None:
    """The name of a module within `model` whose forward was replaced on the instance."""
    below = (name for name, m in model.named_modules() if m is not model and "forward" in vars(m))
    return next(below, None)


def watch(
    model: nn.Module, hooks: list[dict[Any, Any]], settings: Sequence[tuple[dict[str, Any], str]]
) -> _C.ModuleWatch:
    """Sees what was replaced in `model`, or a hook added.

    A module, a norm weight, a bias, a module's forward, or one of the settings (dict, key).
    """
    entries = [(own, key, own[key]) for own, key in settings]
    absent = []
    for module in model.modules():
        parts = {} if isinstance(module, PackedModule) else module._modules  # which it guards
        for own in (parts, {} if module._modules else module._parameters):
            entries.extend((own, name, value) for name, value in own.items())
        if module is model:
            continue
        if "forward" in vars(module):
            entries.append((vars(module), "forward", vars(module)["forward"]))
        else:
            absent.append((vars(module), "forward"))
    return _C.ModuleWatch(entries, hooks, absent)
