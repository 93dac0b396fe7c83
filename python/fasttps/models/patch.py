"""`fasttps.patch`: undoable edits to a live model. Knows nn.Module; knows no model family.

A module is fused by giving it another class, a subclass of its own that computes the same through
our ops. So nothing global changes, hooks still fire, isinstance still holds, and a copy or a
pickle of the model follows its own weights.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, ClassVar

import torch
from torch import nn

from fasttps.models import FAMILIES

# What `patch` calls as it advances: modules done, modules in all, the name of the one just done.
Progress = Callable[[int, int, str], None]


class PatchError(RuntimeError):
    """The model cannot be patched; nothing was changed."""


class FusedModule(nn.Module):
    """The class of a module while it is patched: a subclass of `replaces`, importable by name.

    Attributes:
        replaces: the class that it takes the place of, exactly that one.
        part: "attention" or "mlp": the argument of `patch` that leaves it out.
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

    def fuse(self) -> None:
        """Make ready to run; raises having changed nothing. The class is set already."""

    def unfuse(self) -> None:
        """Take back what `fuse` did, bit for bit. The class is still ours."""

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


@dataclass(frozen=True)
class ReportEntry:
    """What became of one module: `op` it was fused with, or the `reason` why it was skipped."""

    name: str
    class_name: str
    op: str | None
    reason: str | None = None


@dataclass(frozen=True)
class PatchReport:
    """Every module that was looked at; prints as a table with like modules in one line."""

    model: str
    entries: tuple[ReportEntry, ...]

    @property
    def fused(self) -> tuple[ReportEntry, ...]:
        return tuple(entry for entry in self.entries if entry.op is not None)

    @property
    def skipped(self) -> tuple[ReportEntry, ...]:
        return tuple(entry for entry in self.entries if entry.op is None)

    def __str__(self) -> str:
        head = f"{self.model}: {len(self.fused)} modules fused, {len(self.skipped)} skipped"
        return "\n".join([head, *(f"  {line}" for line in self._lines())])

    def _lines(self) -> Iterator[str]:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for entry in self.entries:
            outcome = f"-> {entry.op}" if entry.op is not None else f"skipped: {entry.reason}"
            key = (re.sub(r"\d+", "#", entry.name), entry.class_name, outcome)
            groups.setdefault(key, []).append(entry.name)
        for (_, class_name, outcome), names in groups.items():
            yield f"{_join_names(names)} ({class_name}) {outcome}"


class Patch:
    """A patch in force. `undo()` ends it, and so does leaving it as a context manager."""

    def __init__(self, report: PatchReport, changes: ExitStack) -> None:
        self._report = report
        self._changes = changes

    def undo(self) -> None:
        """Restore every module bit for bit, with its own Parameters. A second call does nothing.

        What you changed meanwhile stays changed: weights, and fields of the config.
        """
        self._changes.close()

    def report(self) -> PatchReport:
        """Which modules were fused, with what, and which were skipped, and why."""
        return self._report

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<Patch of {self._report}>"


def patch(
    model: nn.Module,
    *,
    attention: bool = True,
    mlp: bool = True,
    progress: Progress | None = None,
) -> Patch:
    """Run the attention and the MLPs of `model` through the fused ops, until `.undo()`.

    For LlamaForCausalLM, LlamaModel and whatever else holds transformers' Llama layers.

    - All is checked before anything changes; a failure midway takes everything back. A module
      that cannot be fused stays as it is, and `.report()` says why.
    - MLP weights are packed one layer at a time and the originals' memory is given back: the peak
      is the model plus one MLP. Meanwhile the same Parameters hang in the model, empty, so
      `num_parameters()` does not count them; `state_dict()`, `save_pretrained()` and
      `load_state_dict()` still deal in the original keys and values, and `.to(dtype)` repacks.
      What would not run is refused (a weight that is assigned, a hook on a projection); but an
      edit in place of an empty Parameter does nothing.
    - Inference only: call the model under `torch.no_grad()` or `torch.inference_mode()`
      (`generate` does).
    - With `fasttps.StaticKVCache`, RoPE, the cache write and attention are one op; with any other
      cache the attention alone is ours.

    Args:
        model: in eval mode; changed in place.
        attention, mlp: which of the two to fuse.
        progress: called after each module with (modules done, modules in all, its name).

    Raises:
        PatchError: already patched, in training mode, or nothing could be fused. Nothing was
            changed.
        TypeError: `model` is not an nn.Module, or another argument of another type.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model wanted an nn.Module, got {type(model).__name__}")
    parts = {"attention": attention, "mlp": mlp}
    for name, wanted in parts.items():
        if not isinstance(wanted, bool):
            raise TypeError(f"patch: {name} wanted a bool, got {type(wanted).__name__}")
    if progress is not None and not callable(progress):
        raise TypeError(f"patch: progress wanted a callable, got {type(progress).__name__}")
    kind = type(model).__name__
    for name, module in model.named_modules():
        if isinstance(module, FusedModule):
            raise PatchError(
                f"patch: {kind} is already patched ({name}); undo that patch first (a copy of a "
                "patched model has none: load its state_dict() into a fresh model)"
            )
    found = list(_find(model, parts))
    if found and model.training:
        raise PatchError(f"patch: {kind} is in training mode; fasttps is for inference: eval() it")
    plan = [(name, module, fused) for name, module, fused, reason in found if reason is None]
    report = PatchReport(
        kind,
        tuple(
            ReportEntry(name, type(module).__name__, fused.op if reason is None else None, reason)
            for name, module, fused, reason in found
        ),
    )
    if not plan:
        raise PatchError(_nothing_to_fuse(report))

    with ExitStack() as changes:  # unwinds what was done if anything below raises
        families = dict.fromkeys(_family(module) for _, module, _ in plan)
        for family in filter(None, families):
            family.change_model(model, plan, changes)
        for done, (name, module, fused) in enumerate(plan, start=1):
            _fuse(module, fused)
            changes.callback(_unfuse, module, fused.replaces)
            if progress is not None:
                progress(done, len(plan), name)
        return Patch(report, changes.pop_all())


def _fuse(module: Any, fused: type[FusedModule]) -> None:
    module.__class__ = fused
    try:
        module.fuse()
    except BaseException:
        module.__class__ = fused.replaces
        raise


def _unfuse(module: Any, original: type[nn.Module]) -> None:
    module.unfuse()
    module.__class__ = original


def _find(
    model: nn.Module, parts: dict[str, bool]
) -> Iterator[tuple[str, nn.Module, type[FusedModule], str | None]]:
    """Every module that some family knows, the class for it, and why not if so."""
    shared = shared_tensors(model)
    for name, module in model.named_modules():
        family = _family(module)
        for fused in family.FUSED if family is not None else ():
            if isinstance(module, fused.replaces):
                reason = _obstacle(module, fused, shared) if parts[fused.part] else "not asked for"
                yield name, module, fused, reason


def _family(module: nn.Module) -> ModuleType | None:
    """The family file for the module's class or one of its bases."""
    for base in type(module).__mro__:
        if base.__module__ in FAMILIES:
            return importlib.import_module(FAMILIES[base.__module__])
    return None


def _obstacle(module: nn.Module, fused: type[FusedModule], shared: frozenset[int]) -> str | None:
    """Why the module cannot be fused, whatever its family; then the family's own reasons."""
    if type(module) is not fused.replaces:
        return f"a subclass of {fused.replaces.__name__}, which may compute something else"
    if {"_hf_hook", "_old_forward"} & module.__dict__.keys():
        return "has an accelerate hook; patch before dispatching"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if module.training:
        return "is in training mode"
    return fused.obstacle(module, shared)


def shared_tensors(model: nn.Module) -> frozenset[int]:
    """The data_ptr of every parameter and buffer that is used in more than one place."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or tensor.is_meta or type(tensor.data) is not torch.Tensor:
                continue
            pointer = tensor.data_ptr()
            (shared if pointer in seen else seen).add(pointer)
    return frozenset(shared - {0})


def _nothing_to_fuse(report: PatchReport) -> str:
    if not report.entries:
        known = ", ".join(module.rpartition(".")[2] for module in FAMILIES.values())
        return f"patch: {report.model} has no module that fasttps knows (families: {known})"
    return f"patch: nothing could be fused. {report}"


def _join_names(names: Iterable[str]) -> str:
    """model.layers.0.mlp, model.layers.1.mlp, ... as model.layers.[0-29].mlp."""
    names = list(names)
    numbers = [re.findall(r"\d+", name) for name in names]
    varying = [at for at in range(len(numbers[0])) if len({row[at] for row in numbers}) > 1]
    if len(names) == 1 or len(varying) != 1:
        return ", ".join(names)
    pieces = re.split(r"(\d+)", names[0])
    pieces[2 * varying[0] + 1] = f"[{_ranges(sorted(int(row[varying[0]]) for row in numbers))}]"
    return "".join(pieces)


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
