"""A model of transformers over the blocks of a GGUF file, repacked and never requantised.

    Q4_0            int4, groups of 32          Q4_K            q4_k
    Q4_1            int4_min, groups of 32      Q6_K            q6_k
    Q8_0            int8_group, groups of 32

Matrices of other types (floats, Q5_0, Q5_K, ...) are dequantised and packed in the model's dtype,
and so are gate and up of an MLP if their types differ: what that rounds is lost, and nothing else.
An embedding that is not the head's, biases and norms are in the model's dtype too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fasttps import ops
from fasttps.gguf.feed import PANEL_ROWS, Feed, Piece, pieces
from fasttps.gguf.tensors import Tensors
from fasttps.memory import empty_in_huge_pages
from fasttps.models.model_changes import other_attentions
from fasttps.models.obstacles import return_freed_memory
from fasttps.models.packed_linear import PackedLinear
from fasttps.models.packed_module import PackedModule
from fasttps.models.packed_weight import Packed, Slot
from fasttps.models.patch import Patch, Progress, fuse_all
from fasttps.models.patch_options import Options, Packing, check_request
from fasttps.models.patch_plan import Step, plan
from fasttps.models.weight_source import WeightSource

EMBEDDING = "model.embed_tokens.weight"
# Type in the file to format and columns in a group.
FORMATS = {
    "Q4_0": (ops.PackedFormat.INT4, 32),
    "Q4_1": (ops.PackedFormat.INT4_MIN, 32),
    "Q8_0": (ops.PackedFormat.INT8_GROUP, 32),
    "Q4_K": (ops.PackedFormat.Q4_K, 0),
    "Q6_K": (ops.PackedFormat.Q6_K, 0),
}


def pack_model(
    model: Any,
    tensors: Tensors,
    dtype: torch.dtype,
    *,
    kv: str | None,
    int8_activation: bool,
    progress: Progress | None,
) -> Patch | None:
    """Give a model, which is on the meta device, its weights, and patch it.

    What is not fused has its weights dequantised. None: nothing could be.
    """
    _take_places(model, dtype)
    steps = plan(model, check_request(kv=kv))
    steps = [*_plain_linears(model, tensors, steps), *steps]
    fused = [step for step in steps if step.reason is None]
    others = other_attentions(model)
    packed = {_key(step.name, name) for step in fused for name in step.fused.weight_names()}
    if model.config.tie_word_embeddings and "lm_head.weight" in packed:
        packed.add(EMBEDDING)
    for parameter in tensors.places.keys() - packed:
        model.get_parameter(parameter).data = tensors.values(parameter).to(dtype)
    if not fused and not others:
        return None

    slots = {
        id(step.module): [_Adopted.of(step.name, slot, tensors) for slot in step.fused.slots]
        for step in fused
        if issubclass(step.fused, PackedModule)
    }
    order = [piece for adopted in slots.values() for one in adopted for piece in one.pieces]

    def fill(step: Step) -> None:
        module = step.module
        if not isinstance(module, PackedModule):
            module.fuse(step.options, **step.arguments)
            return
        module.prepare(step.options)
        adopted = slots[id(module)]
        for one in adopted:
            one.fill(module, tensors, feed, int8_activation)
        if not all(one.pieces for one in adopted):
            module.pack()

    with Feed(tensors, order) as feed:
        patch = fuse_all(model, steps, WeightSource(tensors.path), progress, fill, others)
    return_freed_memory()
    return patch


def _plain_linears(model: Any, tensors: Tensors, steps: list[Step]) -> Iterator[Step]:
    """The linears that no family knows, as those of convolutions, whose blocks have a format."""
    known = {_key(step.name, name) for step in steps for name in step.fused.weight_names()}
    for name, module in model.named_modules():
        place = tensors.places.get(_key(name, ""))
        if (
            type(module) is nn.Linear
            and place is not None
            and place.type_name in FORMATS
            and _key(name, "") not in known
            and PackedLinear.obstacle(module, frozenset()) is None
        ):
            yield Step(name, module, PackedLinear, Options(Packing(), None), None)


def _take_places(model: Any, dtype: torch.dtype) -> None:
    """Memory for every parameter, which takes none as long as nothing is written to it."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


@dataclass(frozen=True)
class _Adopted:
    """How a slot comes by its weights.

    Attributes:
        keys: of the weights that its names stand for.
        kind, group_size: what their blocks are packed as.
        parts: of each of gate and up, or of the one, its pieces; none: they have no format, or
            not the same, and are dequantised.
    """

    slot: Slot
    keys: list[str]
    kind: ops.PackedFormat
    group_size: int
    parts: list[list[Piece]]

    @classmethod
    def of(cls, module_name: str, slot: Slot, tensors: Tensors) -> _Adopted:
        keys = [_key(module_name, name) for name in slot.names]
        keys = [key if key in tensors.places else EMBEDDING for key in keys]
        places = [tensors.places[key] for key in keys]
        types = {place.type_name for place in places}
        if len(types) > 1 or not types <= FORMATS.keys():
            return cls(slot, keys, ops.PackedFormat.F32, 0, [])
        rows = places[0].shape[0]
        ranges = [(key, 0, rows) for key in keys]
        if slot.halves:
            ranges = [(keys[0], 0, rows // 2), (keys[0], rows // 2, rows)]
        parts = [list(pieces(tensors, *one)) for one in ranges]
        return cls(slot, keys, *FORMATS[types.pop()], parts)

    @property
    def pieces(self) -> list[Piece]:
        return [piece for part in self.parts for piece in part]

    def fill(
        self, module: PackedModule, tensors: Tensors, feed: Feed, int8_activation: bool
    ) -> None:
        """Give the slot its blocks, repacked; or its weights, which `module.pack` is to pack."""
        if not self.parts:
            for name, key in zip(self.slot.names, self.keys):
                weight: Any = module.get_submodule(name).weight if name else module.weight
                weight.data = tensors.values(key).to(weight.dtype)
            return
        cols = tensors.places[self.keys[0]].shape[1]
        rows = self.parts[0][-1].end - self.parts[0][0].begin
        # [panels, parts, bytes]: gate's and up's panels of 16 rows in turn, as the MLP reads them.
        row = torch.empty(
            1, tensors.places[self.keys[0]].row_bytes, dtype=torch.uint8, device="meta"
        )
        panel_bytes = ops.pack_gguf(row, format=self.kind, rows=1, cols=cols).numel()
        shape = (-(-rows // PANEL_ROWS), len(self.parts), panel_bytes)
        made = empty_in_huge_pages(shape, torch.uint8)
        for which, part in enumerate(self.parts):
            for piece in part:
                count, panel = piece.end - piece.begin, (piece.begin - part[0].begin) // PANEL_ROWS
                ops.pack_gguf(
                    feed.take(piece),
                    format=self.kind,
                    rows=count,
                    cols=cols,
                    out=made[panel : panel + -(-count // PANEL_ROWS), which],
                )
        kind = Packed(
            self.kind,
            self.group_size,
            rows,
            cols,
            exact=False,
            int8_activation=int8_activation,
            inference=False,
        )
        module.adopt(self.slot.buffer, made.view(-1), kind)


def _key(module_name: str, name: str) -> str:
    return ".".join(filter(None, (module_name, name, "weight")))
