"""Which modules of a model are fused, with what, and why the others are not. Changes nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from fasttps.models import FAMILIES
from fasttps.models.fused_module import FusedModule
from fasttps.models.packed_linear import PackedEmbedding, PackedLinear
from fasttps.models.patch_options import PARTS, Options, Packing, Request


class Linears(NamedTuple):
    """The linears `names` of every module of class `owner`, packed each by itself as a `part`."""

    owner: type[nn.Module]
    part: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One module, the class for it, and the `reason` why it is left as it is, if it is."""

    name: str
    module: Any
    fused: type[FusedModule]
    options: Options
    reason: str | None
    wanted: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)


Owners = dict[int, list[tuple[str, nn.Module]]]


def plan(model: nn.Module, request: Request) -> list[Step]:
    """Every module that some family knows, in the order in which they are to be fused."""
    shared = shared_tensors(model)
    owners = owners_of_parameters(model)
    linears: dict[int, tuple[str, str | None]] = {}  # of the modules to come: part, reason
    steps: list[Step] = []
    whole: list[Step] = []  # models of which every part is fused: last, and only then
    for name, module in model.named_modules():
        if id(module) in linears:
            steps += _linear_steps(owners, name, module, *linears[id(module)], shared, request)
        family = family_of(module)
        if family is None:
            continue
        fused_reason = None
        for fused in family.FUSED:
            if isinstance(module, fused.replaces):
                step = _step(name, module, fused, fused.part, shared, request)
                if fused.part in PARTS:
                    steps.append(step)
                    fused_reason = step.reason
                elif step.wanted:
                    whole.append(step)
        for owner, part, names in family.LINEARS:
            if isinstance(module, owner):
                reason = f"its {type(module).__name__} is skipped" if fused_reason else None
                for child in names:
                    linears[id(module._modules.get(child))] = (part, reason)
    if all(step.reason is None for step in steps):
        steps += whole
    return steps


def family_of(module: nn.Module) -> ModuleType | None:
    """The family file for the module's class or one of its bases."""
    for base in type(module).__mro__:
        if base.__module__ in FAMILIES:
            return importlib.import_module(FAMILIES[base.__module__])
    return None


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


def _step(
    name: str,
    module: nn.Module,
    fused: type[FusedModule],
    part: str,
    shared: frozenset[int],
    request: Request,
    reason: str | None = None,
    **arguments: Any,
) -> Step:
    packing = request.packings.get(part)
    if packing is None:
        options = Options(Packing(), request.kv)
        return Step(name, module, fused, options, "not asked for", wanted=False)
    reason = reason or _obstacle(module, fused, shared)
    return Step(name, module, fused, Options(packing, request.kv), reason, arguments=arguments)


def owners_of_parameters(model: nn.Module) -> Owners:
    """The modules that have a Parameter, with their names, by its id."""
    owners: Owners = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module))
    return owners


def _linear_steps(
    owners: Owners,
    name: str,
    linear: nn.Module,
    part: str,
    reason: str | None,
    shared: frozenset[int],
    request: Request,
) -> Iterator[Step]:
    """The Linear, and the Embedding whose Parameter is its weight, if that is all that shares it.

    transformers ties the embedding to the head so.
    """
    weight: Any = linear._parameters.get("weight")
    others = [owner for owner in owners.get(id(weight), ()) if owner[1] is not linear]
    if len(others) == 1 and isinstance(others[0][1], nn.Embedding) and part in request.packings:
        shared -= {weight.data_ptr()}
        tied = _step(*others[0], _packed(others[0][1]), part, shared, request, head=linear)
        if reason is None and tied.reason is not None:
            reason = f"its weight is that of {tied.name}, which {tied.reason}"
        step = _step(name, linear, PackedLinear, part, shared, request, reason)
        yield step
        if step.reason is None:
            yield tied
        return
    yield _step(name, linear, PackedLinear, part, shared, request, reason)


def _packed(embedding: nn.Module) -> type[PackedEmbedding]:
    """The class for an embedding that is tied to the head."""
    own = getattr(family_of(embedding), "EMBEDDINGS", ())
    return next((kind for kind in own if kind.replaces is type(embedding)), PackedEmbedding)


def _obstacle(module: nn.Module, fused: type[FusedModule], shared: frozenset[int]) -> str | None:
    """Why the module cannot be fused, whatever its family; then the family's own reasons."""
    if type(module) is not fused.replaces:
        if not isinstance(module, fused.replaces):
            kind = type(module)
            name = kind.__name__
            if name == fused.replaces.__name__:  # such as the Linear of an adapter
                name = f"{kind.__module__}.{name}"
            return f"is a {name}, not a {fused.replaces.__name__}"
        return (
            f"a {type(module).__name__}, a subclass of {fused.replaces.__name__}, which may "
            "compute something else"
        )
    if {"_hf_hook", "_old_forward"} & module.__dict__.keys():
        return "has an accelerate hook; patch before dispatching"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if module.training:
        return "is in training mode"
    return fused.obstacle(module, shared)
