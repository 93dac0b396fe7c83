"""A model of transformers over the quants of a checkpoint, repacked and never requantised.

    4 bits, symmetric     int4 in groups of 32, 64 or 128
    4 bits, zero points   int4_zero in groups of 32, 64 or 128
    8 bits, symmetric     int8 for a scale a row, int8_group in groups of 32

Larger groups become several with the same scale. What no format holds bit for bit (scales that
float16 has not, groups of other sizes, zero points of 8 bits) is dequantised and packed in the
model's dtype.

With act-order the columns are packed in the order of their groups. A linear gathers its input in
that order as it runs; in an MLP, gate and up gather theirs, and make theirs in the order in which
down wants it, for their rows have been moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fasttps import ops
from fasttps.checkpoint.tensors import Tensors
from fasttps.checkpoint.weights import Form, QuantizedWeight, common_form, parts, same_columns
from fasttps.memory import empty_in_huge_pages
from fasttps.models.model_changes import other_attentions
from fasttps.models.obstacles import return_freed_memory
from fasttps.models.packed_linear import PackedEmbedding, PackedLinear
from fasttps.models.packed_module import PackedModule
from fasttps.models.packed_weight import PANEL_ROWS, Packed, Slot
from fasttps.models.patch import Patch, Progress, fuse_all
from fasttps.models.patch_options import Options, Packing, check_request
from fasttps.models.patch_plan import Step, plan
from fasttps.models.weight_source import WeightSource

ROWS_AT_ONCE = 4096  # of floats: a multiple of 16


def pack_model(
    model: Any,
    tensors: Tensors,
    *,
    kv: str | None,
    int8_activation: bool,
    progress: Progress | None,
) -> Patch | None:
    """Give a model, whose parameters have places and no values, its weights, and patch it.

    What is not fused has its weights dequantised. None: nothing could be.
    """
    steps = plan(model, check_request(kv=kv))
    steps = [*_plain_linears(model, tensors, steps), *steps]
    fused = [step for step in steps if step.reason is None]
    others = other_attentions(model)
    packed = {_key(step.name, name) for step in fused for name in step.fused.weight_names()}
    fill(model, tensors, packed)
    if not fused and not others:
        return None
    tied = {id(step.arguments["head"]) for step in fused if issubclass(step.fused, PackedEmbedding)}

    def adopt(step: Step) -> None:
        module = step.module
        if not isinstance(module, PackedModule):
            module.fuse(step.options, **step.arguments)
            return
        module.prepare(step.options)
        _adopt(step.name, module, tensors, int8_activation, id(module) in tied)
        tensors.forget()
        return_freed_memory()  # that of the quants

    return fuse_all(model, steps, WeightSource(tensors.folder), progress, adopt, others)


def fill(model: nn.Module, tensors: Tensors, without: set[str] | frozenset[str]) -> None:
    """Give the parameters their values, dequantised, but for those that come packed."""
    seen = {id(model.get_parameter(name)) for name in without}
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen and name not in without:
            parameter.data.copy_(tensors.values(name, tuple(parameter.shape)))
            tensors.forget()


def _plain_linears(model: Any, tensors: Tensors, steps: list[Step]) -> Iterator[Step]:
    """The quantised linears that no family knows."""
    known = {_key(step.name, name) for step in steps for name in step.fused.weight_names()}
    for name, module in model.named_modules():
        if (
            name in tensors.quantized
            and _key(name, "") not in known
            and PackedLinear.obstacle(module, frozenset()) is None
        ):
            yield Step(name, module, PackedLinear, Options(Packing(), None), None)


def _adopt(
    name: str, module: PackedModule, tensors: Tensors, int8_activation: bool, is_tied: bool
) -> None:
    """Give a module its packed weights; `is_tied`: an embedding reads rows of it."""
    dtype = module.get_parameter(f"{module.slots[0].names[0]}.weight".lstrip(".")).dtype
    slots = {slot.buffer: _weights(name, module, slot, tensors) for slot in module.slots}
    forms = {buffer: _form(weights, is_tied) for buffer, weights in slots.items()}
    order: Tensor | None = None  # of what the last slot takes, where that is another's rows
    if len(module.slots) == 2:
        last = slots[module.slots[1].buffer]
        order = None if last is None else last[0].columns
        if order is not None and None in forms.values():
            forms = dict.fromkeys(forms)  # the rows of floats are not moved
    for slot in module.slots:
        form, weights = forms[slot.buffer], slots[slot.buffer]
        is_quantized = form is not None and weights is not None
        if form is not None and weights is not None:
            rows = order if slot is module.slots[0] else None
            packed, shape = _packed(weights, slot, form, rows)
        else:
            form = Form(ops.PackedFormat.of(dtype), 0)
            packed, shape = _packed_floats(name, module, slot, form, tensors)
        kind = Packed(
            form.format,
            form.group_size,
            *shape,
            exact=not is_quantized,
            int8_activation=int8_activation and is_quantized,
            inference=False,
            columns=weights[0].columns if is_quantized and weights is not None else None,
        )
        module.adopt(slot.buffer, packed, kind)


def _weights(
    name: str, module: PackedModule, slot: Slot, tensors: Tensors
) -> list[QuantizedWeight] | None:
    """The quantised weights of a slot; None: not all of them are."""
    linears = [".".join(filter(None, (name, linear))) for linear in slot.names]
    if not tensors.quantized.issuperset(linears):
        return None
    shapes = [module.weight_shape(linear) for linear in slot.names]
    return [tensors.weight(key, rows, cols) for key, (rows, cols) in zip(linears, shapes)]


def _form(weights: list[QuantizedWeight] | None, is_tied: bool) -> Form | None:
    if weights is None or not same_columns(weights):
        return None
    if is_tied and weights[0].columns is not None:
        return None
    return common_form(weights)


def _packed(
    weights: list[QuantizedWeight], slot: Slot, form: Form, order: Tensor | None
) -> tuple[Tensor, tuple[int, int]]:
    """The buffer of a slot, and the shape of each part; `order`: in which its rows are to lie."""
    of_slot = list(parts(weights, slot.halves))
    shape = of_slot[0].shape
    if len(of_slot) == 1:
        return of_slot[0].pack(form), shape
    made = _Panels(shape[0], len(of_slot))
    for which, part in enumerate(of_slot):
        made.put(which, range(shape[0]), (part if order is None else part.rows(order)).pack(form))
    return made.buffer, shape


def _packed_floats(
    name: str, module: PackedModule, slot: Slot, form: Form, tensors: Tensors
) -> tuple[Tensor, tuple[int, int]]:
    """The same of weights that are not quantised, or dequantised; some rows at a time."""
    rows, cols = module.weight_shape(slot.names[0])
    count = rows // 2 if slot.halves else rows
    made = _Panels(count, 2 if slot.halves else len(slot.names))
    which = 0
    for linear in slot.names:
        read = tensors.rows(_key(name, linear), (rows, cols))
        for first in range(0, rows, count):
            for row in range(0, count, ROWS_AT_ONCE):
                some = range(row, min(row + ROWS_AT_ONCE, count))
                values = read(slice(first + some.start, first + some.stop)).to(form.format.dtype)
                made.put(which, some, ops.pack_weight(values, format=form.format))
                tensors.forget()
            which += 1
    return made.buffer, (count, cols)


class _Panels:
    """A packed buffer; gate's and up's panels of 16 rows in turn, as the MLP reads them."""

    def __init__(self, rows: int, parts: int) -> None:
        self._panels, self._parts = -(-rows // PANEL_ROWS), parts
        self._made: Tensor | None = None

    def put(self, part: int, rows: range, packed: Tensor) -> None:
        """Rows of a part, from a multiple of 16 on."""
        panels = packed.view(-(-len(rows) // PANEL_ROWS), -1)
        if self._made is None:
            shape = (self._panels, self._parts, panels.shape[1])
            self._made = empty_in_huge_pages(shape, torch.uint8)
        first = rows.start // PANEL_ROWS
        self._made[first : first + len(panels), part] = panels

    @property
    def buffer(self) -> Tensor:
        assert self._made is not None
        return self._made.view(-1)


def _key(module_name: str, name: str) -> str:
    return ".".join(filter(None, (module_name, name, "weight")))
