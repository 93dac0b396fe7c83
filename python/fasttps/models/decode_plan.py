"""What `decode_step` is told of a model once, and what that rests on. Knows no family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fasttps import _C
from fasttps.models.decoder_parts import Parts
from fasttps.models.model_watch import hooks_below, own_forward, watch
from fasttps.models.packed_module import packing_epoch
from fasttps.ops.decode_step import DecodeStep

MAX_TOKENS = 8  # new tokens of a sequence; more are a prompt, which the layers take one by one
MAX_ROWS = 64  # new tokens of a sequence times query heads of a KV head, as the op has it


@dataclass
class Plan:
    """Arguments of the op that do not change between tokens, and what they rest on."""

    epoch: int  # of packing: packed buffers are replaced when weights are loaded or moved
    watch: _C.ModuleWatch
    hooks: list[dict[Any, Any]]
    lists: tuple[Any, ...] = ()  # weights, norms, biases
    options: dict[str, Any] = field(default_factory=dict)
    obstacle: str | None = None
    max_tokens: int = MAX_TOKENS
    windows: list[int] = field(default_factory=list)  # one a layer, 0: none
    kind: tuple[Any, ...] = ()  # num_kv_heads, head_dim and dtype of the keys
    # By cache, for as long as it lives: its tensors watched, and the op bound to them.
    bound: WeakKeyDictionary[Any, tuple[_C.ModuleWatch, DecodeStep]] = field(
        default_factory=WeakKeyDictionary
    )

    def is_current(self) -> bool:
        return self.epoch == packing_epoch() and self.watch.is_unchanged()

    def step(self, cache: Any) -> DecodeStep:
        """The op on the plan's weights and the tensors that `cache` has now."""
        found = self.bound.get(cache)
        if found is not None and found[0].is_unchanged():
            return found[1]
        weights, norms, biases = self.lists
        keys, values, k_scales, v_scales = cache.step_buffers()
        step = DecodeStep(
            weights,
            norms,
            biases,
            keys,
            values,
            k_scales=k_scales,
            v_scales=v_scales,
            ring=any(cache.is_sliding),
            **self.options,
        )
        watch = _C.ModuleWatch(cache.step_entries())
        self.bound[cache] = watch, step
        return step


def make_plan(model: nn.Module, parts: Parts | str, kind: tuple[Any, ...]) -> Plan:
    """The plan for a model of these parts, whose keys are of `kind`.

    A string in the place of the parts is why the op cannot run them.
    """
    hooks = hooks_below(model)
    settings = () if isinstance(parts, str) else parts.settings
    plan = Plan(packing_epoch(), watch(model, hooks, settings), hooks, kind=kind)
    if isinstance(parts, str):
        plan.obstacle = parts
        return plan
    if (changed := own_forward(model)) is not None:
        plan.obstacle = f"{changed} has a forward of its own"
        return plan
    lists = parts.lists
    plan.lists = ([w.packed for w in parts.weights], parts.norms, lists.pop("biases"))
    plan.options = {
        **lists,
        **parts.options,
        "formats": [int(w.format) for w in parts.weights],
        "group_sizes": [w.group_size for w in parts.weights],
    }
    for name, packed in (("lm_head", parts.lm_head), ("embedding", parts.embedding)):
        if packed is not None:
            plan.options[name] = packed.packed
            plan.options[f"{name}_format"] = int(packed.format)
            plan.options[f"{name}_group_size"] = packed.group_size
    plan.windows = parts.windows
    plan.max_tokens = min(MAX_TOKENS, MAX_ROWS * kind[0] // parts.options["num_heads"])
    return plan
