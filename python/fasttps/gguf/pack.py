"""A model of transformers over the blocks of a GGUF file, repacked and never requantised.

    Q4_0            int4, groups of 32          Q4_K            q4_k
    Q4_1            int4_min, groups of 32      Q6_K            q6_k
    Q8_0            int8_group, groups of 32

Matrices of other types (floats, Q5_0, Q5_K, ...) are dequantised and packed in the model's dtype,
and so are gate and up of an MLP if their types differ: what that rounds is lost, and nothing else.
An embedding that is not the head's, biases and norms are in the model's dtype too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fasttps import ops
from fasttps.gguf.tensors import Tensors
from fasttps.models.obstacles import return_freed_memory
from fasttps.models.packed_module import Packed, PackedModule, Slot
from fasttps.models.patch import Patch, Progress, fuse_all
from fasttps.models.patch_options import check_request
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
    request = check_request(
        attention=True,
        mlp=True,
        lm_head=True,
        decode_step=True,
        weights=None,
        group_size=None,
        kv=kv,
        int8_activation=None,
        keep_original=False,
    )
    steps = plan(model, request)
    fused = [step for step in steps if step.reason is None]
    packed = {_key(step.name, name) for step in fused for name in step.fused.weight_names()}
    if model.config.tie_word_embeddings and "lm_head.weight" in packed:
        packed.add(EMBEDDING)
    for parameter in tensors.places.keys() - packed:
        model.get_parameter(parameter).data = tensors.values(parameter).to(dtype)
    if not fused:
        return None

    def fill(step: Step) -> None:
        module = step.module
        if not isinstance(module, PackedModule):
            module.fuse(step.options, **step.arguments)
            return
        module.prepare(step.options)
        adopted = [
            _adopt(step.name, module, slot, tensors, int8_activation) for slot in module.slots
        ]
        if all(adopted):
            return_freed_memory()  # that of the blocks
        else:
            module.pack()

    return fuse_all(model, steps, WeightSource(tensors.path), progress, fill)


def _take_places(model: Any, dtype: torch.dtype) -> None:
    """Memory for every parameter, which takes none as long as nothing is written to it."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def _adopt(
    module_name: str, module: PackedModule, slot: Slot, tensors: Tensors, int8_activation: bool
) -> bool:
    """Whether the blocks of a slot's weights could be repacked; else it has dequantised ones."""
    keys = [_key(module_name, name) for name in slot.names]
    keys = [key if key in tensors.places else EMBEDDING for key in keys]
    places = [tensors.places[key] for key in keys]
    kinds = {place.type_name for place in places}
    if len(kinds) > 1 or not kinds <= FORMATS.keys():
        for name, key in zip(slot.names, keys):
            weight: Any = module.get_submodule(name).weight if name else module.weight
            weight.data = tensors.values(key).to(weight.dtype)
        return False
    kind, group_size = FORMATS[kinds.pop()]
    halves = getattr(slot, "halves", False)
    rows, cols = places[0].shape
    if halves:
        rows //= 2
    packed = [
        ops.pack_gguf(part, format=kind, rows=rows, cols=cols)
        for key in keys
        for part in tensors.blocks(key).chunk(1 + halves)
    ]
    module.adopt(
        slot.buffer,
        packed[0] if len(packed) == 1 else _alternate(packed, rows),
        Packed(
            kind,
            group_size,
            rows,
            cols,
            exact=False,
            int8_activation=int8_activation,
            inference=False,
        ),
    )
    return True


def _alternate(packed: list[Tensor], rows: int) -> Tensor:
    """Gate's and up's panels of 16 rows in turn, as the fused MLP reads them."""
    panels = -(-rows // 16)
    return torch.stack([one.view(panels, -1) for one in packed], dim=1).reshape(-1)


def _key(module_name: str, name: str) -> str:
    return ".".join(filter(None, (module_name, name, "weight")))
