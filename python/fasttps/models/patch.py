"""`fasttps.patch`: undoable edits to a live model. Knows nn.Module; knows no model family.

A module is fused by giving it another class, a subclass of its own that computes the same through
our ops. So nothing global changes, hooks still fire, isinstance still holds, and a copy or a
pickle of the model follows its own weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from fasttps.models import FAMILIES
from fasttps.models.fused_module import FusedModule, PatchError
from fasttps.models.model_changes import change_model, notes, other_attentions
from fasttps.models.patch_options import check_request
from fasttps.models.patch_plan import Step, plan
from fasttps.models.patch_report import PatchReport, ReportEntry, join_by_pattern
from fasttps.models.transformers_adapter import check_release
from fasttps.models.weight_source import WeightSource

__all__ = ["FusedModule", "Patch", "PatchError", "PatchReport", "ReportEntry", "patch"]

# What `patch` calls as it advances: modules done, modules in all, the name of the one just done.
Progress = Callable[[int, int, str], None]


class Patch:
    """A patch in force. `undo()` ends it, and so does leaving it as a context manager.

    Attributes:
        model: the patched model.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: Iterable[Step],
        changes: ExitStack,
        source: WeightSource | None,
        others: Iterable[ReportEntry] = (),
    ) -> None:
        self.model = model
        self._steps = tuple(steps)
        self._changes = changes
        self._source = source
        self._others = tuple(others)
        self._in_force = True

    @property
    def is_exact(self) -> bool:
        """Whether `undo()` can restore every module bit for bit."""
        return not self._lost()

    def undo(self) -> None:
        """Restore every module bit for bit, with its own Parameters. A second call does nothing.

        What you changed meanwhile stays changed: weights, and fields of the config.

        Raises:
            PatchError: weights are quantised, and no original was kept (`keep_original=True`) nor
                a `source` given; or the source has changed. Nothing was changed.
        """
        if lost := self._lost():
            raise PatchError(
                f"patch: cannot undo, the weights of {join_by_pattern(lost)} are quantised and "
                "their originals are gone; load the model again, or patch it with "
                "keep_original=True or source=PATH"
            )
        if self._source is not None and self._in_force:
            self._source.check(dict(_lossy_weights(self._steps)))
        self._in_force = False
        self._changes.close()

    def report(self) -> PatchReport:
        """Which way each module takes, and why: fused, by transformers' interface, or skipped."""
        entries = (*map(self._entry, self._steps), *self._others)
        return PatchReport(type(self.model).__name__, entries, self._undo_says())

    def cache(self, max_seq_len: int) -> Any:
        """A StaticKVCache for the model, of the `kv` that the patch was asked for."""
        from fasttps.kv_cache import StaticKVCache

        return StaticKVCache.for_model(self.model, max_seq_len)

    def _entry(self, step: Step) -> ReportEntry:
        if step.reason is not None:
            name = type(step.module).__name__
            return ReportEntry(step.name, name, None, step.reason)
        ours = isinstance(step.module, step.fused)
        return ReportEntry(
            step.name,
            step.fused.replaces.__name__,
            step.fused.op,
            formats=step.module.formats if ours else None,
            lossy=ours and step.module.inexact,
        )

    def _undo_says(self) -> str | None:
        """How exact `undo` is, where that is not plain."""
        if not any(self._entry(step).lossy for step in self._steps):
            return None
        if not self.is_exact:
            return "undo is not possible, the originals are gone"
        if self._source is not None:
            return f"undo is exact, from {self._source.path}"
        return "undo is exact, the originals are kept"

    def _lost(self) -> list[str]:
        """Names of the modules that cannot be restored bit for bit."""
        if not self._in_force:
            return []
        return [
            step.name
            for step in self._steps
            if isinstance(step.module, step.fused)
            and (step.module.lossy if self._source is None else step.module.lost)
        ]

    def __enter__(self) -> Patch:
        if lost := self._lost():
            raise PatchError(
                f"patch: cannot be undone at the end of a with block, for the weights of "
                f"{join_by_pattern(lost)} are quantised; patch with keep_original=True or "
                "source=PATH"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<Patch of {self.report()}>"


def patch(
    model: nn.Module,
    weights: str | None = None,
    *,
    group_size: int | None = None,
    kv: str | None = None,
    int8_activation: bool | None = None,
    attention: bool = True,
    mlp: bool = True,
    lm_head: bool | str = True,
    decode_step: bool = True,
    keep_original: bool = False,
    source: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Patch:
    """Run the linears, the attention and the MLPs of `model` through our ops, until `.undo()`.

    For models of transformers that hold layers of a family in `fasttps.models.FAMILIES`: Llama,
    Mistral, Qwen2, Qwen3, Phi-3, Gemma 2 and 3, GLM, LFM2, Granite, OLMo 2, SmolLM3, StarCoder2; of
    Mixtral, Qwen3-MoE, OLMoE and gpt-oss all but the experts. Of other models the attention alone
    becomes ours, if it asks transformers' attention interface for it.

    - All is checked before anything changes; a failure midway takes everything back. A module
      that cannot be fused stays as it is, and `.report()` says why; if `weights` were asked for
      and it has some of them, that is an error.
    - Weights are packed one after another and the originals' memory is given back: the peak is
      the model plus its largest weight (or gate and up of one MLP). Meanwhile the same
      Parameters hang in the model, empty, so `num_parameters()` does not count them;
      `state_dict()`, `save_pretrained()` and `load_state_dict()` still deal in the original keys
      and values (of quantised weights, what those stand for, in the model's dtype), and
      `.to(dtype)` repacks. What would not run is refused (a weight that is assigned, a hook on a
      projection of an MLP); but an edit in place of an empty Parameter does nothing.
    - An embedding that is tied to the head reads its rows from the packed head.
    - Inference only: call the model under `torch.no_grad()` or `torch.inference_mode()`
      (`generate` does).
    - With `fasttps.StaticKVCache`, RoPE, the cache write and attention are one op; with any other
      cache the attention alone is ours. And once such a cache holds the prompt, the next tokens
      (up to eight a sequence) go through all layers and the head as one op.

    Args:
        model: in eval mode; changed in place.
        weights: None packs them as what they are, which `undo` takes back bit for bit. "bf16",
            "int8" or "int4" (a scale for each group of columns) round them.
        group_size: columns in a group: 32 (default), of "int4" also 64 or 128. Of "int8" also 0: a
            scale for a whole row, 5 % fewer bytes and three times the error.
        kv: what the caches of `Patch.cache` and `StaticKVCache.for_model` hold: "bf16" or "int8";
            None: what the keys are.
        int8_activation: whether products with int8 and int4 weights round the activations to
            int8 in groups of 32, which is much faster; the default is True.
        attention, mlp, lm_head: which of them to fuse, with their weights. lm_head may also be
            the `weights` of the head alone.
        decode_step: whether a token may be one op; it can where the other three are fused.
        keep_original: keep the weights that are rounded, so that `undo` is exact.
        source: where the model was loaded from, a HuggingFace folder with safetensors or a GGUF
            file: `undo` reads the weights that are rounded from there. They are compared now.
        progress: called after each module with (modules done, modules in all, its name).

    Raises:
        PatchError: already patched, in training mode, nothing could be fused, this transformers is
            not as expected, the `weights` that were asked for cannot be had, or `source` has
            others. Nothing was changed.
        TypeError, ValueError: `model` is not an nn.Module, or another argument is wrong.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model wanted an nn.Module, got {type(model).__name__}")
    request = check_request(
        attention=attention,
        mlp=mlp,
        lm_head=lm_head,
        decode_step=decode_step,
        weights=weights,
        group_size=group_size,
        kv=kv,
        int8_activation=int8_activation,
        keep_original=keep_original,
    )
    if progress is not None and not callable(progress):
        raise TypeError(f"patch: progress wanted a callable, got {type(progress).__name__}")
    kind = type(model).__name__
    for name, module in model.named_modules():
        if isinstance(module, FusedModule):
            raise PatchError(
                f"patch: {kind} is already patched ({name or 'itself'}); undo that patch first "
                "(a copy of a patched model has none: load its state_dict() into a fresh model)"
            )
    if (differing := check_release(model)) is not None:
        raise PatchError(f"patch: {differing}")
    steps = plan(model, request)
    others = other_attentions(model) if attention else {}
    if (steps or others) and model.training:
        raise PatchError(f"patch: {kind} is in training mode; fasttps is for inference: eval() it")
    fusable = [step for step in steps if step.reason is None]
    if not fusable and not others:
        raise PatchError(_nothing_to_fuse(kind, steps))
    if weights is not None and not any(step.fused.weight_names() for step in fusable):
        raise PatchError(f"patch: weights={weights!r} cannot be had, {kind} has no such linears")
    _refuse_skipped_weights(steps)
    weight_source = _open_source(source, fusable)

    return fuse_all(model, steps, weight_source, progress, others=others)


def fuse_all(
    model: nn.Module,
    steps: Iterable[Step],
    source: WeightSource | None,
    progress: Progress | None,
    fill: Callable[[Step], None] | None = None,
    others: dict[str, nn.Module] | None = None,
) -> Patch:
    """Fuse what a plan says; on an error, everything is taken back.

    fill: makes a module whose class is set ready to run, in the place of its `fuse`.
    others: attentions that only ask for ours, by name.
    """
    steps = list(steps)
    fusable = [step for step in steps if step.reason is None]
    with ExitStack() as changes:  # unwinds what was done if anything below raises
        others = others or {}
        change_model(model, fusable, others.values(), changes)
        try:
            for done, step in enumerate(fusable, start=1):
                _fuse(step, fill)
                changes.callback(_unfuse, step, source)
                if progress is not None:
                    progress(done, len(fusable), step.name)
        except BaseException as error:
            if source is None:
                _tell_what_is_lost(error, fusable)
            raise
        return Patch(model, steps, changes.pop_all(), source, notes(model, others))


def _fuse(step: Step, fill: Callable[[Step], None] | None) -> None:
    step.module.__class__ = step.fused
    try:
        if fill is None:
            step.module.fuse(step.options, **step.arguments)
        else:
            fill(step)
    except BaseException:
        step.module.__class__ = step.fused.replaces
        raise


def _unfuse(step: Step, source: WeightSource | None) -> None:
    if source is None:
        step.module.unfuse()
    else:
        step.module.unfuse(lambda name: source.read(_key(step.name, name)))
    step.module.__class__ = step.fused.replaces


def _key(module_name: str, name: str) -> str:
    return ".".join(filter(None, (module_name, name, "weight")))


def _lossy_weights(steps: Iterable[Step]) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Key and shape of every weight that `undo` needs a source for."""
    for step in steps:
        if isinstance(step.module, step.fused):
            for name in step.module.lossy:
                yield _key(step.name, name), step.module.shape_of(name)


def _open_source(path: Any, steps: Iterable[Step]) -> WeightSource | None:
    """The source, if `undo` will need it and it has the weights that the model has."""
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"patch: source wanted a path, got {type(path).__name__}")
    weights = {
        _key(step.name, name): (step.module.get_submodule(name) if name else step.module).weight
        for step in steps
        if step.options.packing.weights is not None and not step.options.packing.keep_original
        for name in step.fused.weight_names()
    }
    if not weights:
        return None
    source = WeightSource(path)
    source.check({key: tuple(weight.shape) for key, weight in weights.items()})
    source.check_values(weights)
    return source


def _refuse_skipped_weights(steps: Iterable[Step]) -> None:
    """What is asked for explicitly works or raises."""
    left = [
        step
        for step in steps
        if step.reason is not None
        and step.wanted
        and step.fused.weight_names()
        and step.options.packing.weights is not None
    ]
    if left:
        raise PatchError(
            f"patch: weights={left[0].options.packing.weights!r} cannot be had for "
            f"{join_by_pattern(step.name for step in left)}: {left[0].name} {left[0].reason}; "
            "leave them out (attention=, mlp=, lm_head=) or give weights=None"
        )


def _tell_what_is_lost(error: BaseException, steps: Iterable[Step]) -> None:
    names = [
        step.name for step in steps if isinstance(step.module, step.fused) and step.module.lossy
    ]
    if names:
        error.add_note(
            f"patch: the weights of {join_by_pattern(names)} were quantised already and are now "
            "what that made of them; load the model again"
        )


def _nothing_to_fuse(kind: str, steps: Iterable[Step]) -> str:
    if not steps:
        known = ", ".join(module.rpartition(".")[2] for module in FAMILIES.values())
        return f"patch: {kind} has no module that fasttps knows (families: {known})"
    entries = (
        ReportEntry(step.name, type(step.module).__name__, None, step.reason) for step in steps
    )
    return f"patch: nothing could be fused. {PatchReport(kind, tuple(entries))}"
