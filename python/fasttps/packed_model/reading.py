"""`fasttps.load`: a model that `fasttps.save` wrote, patched as it was."""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasttps import ops
from fasttps.models import FAMILIES
from fasttps.models.fused_module import FusedModule
from fasttps.models.model_changes import change_model
from fasttps.models.packed_linear import PackedEmbedding, PackedLinear
from fasttps.models.packed_module import PackedModule
from fasttps.models.packed_weight import Packed, Slot
from fasttps.models.patch_options import KV_DTYPES, WEIGHTS, Options, Packing
from fasttps.models.patch_plan import Step
from fasttps.packed_model.manifest import (
    COLUMNS,
    MANIFEST,
    BrokenModel,
    Manifest,
    SavedBuffer,
    SavedModule,
    is_packed_model,
    read_manifest,
)
from fasttps.packed_model.skeleton import empty_model, replace_parameter
from fasttps.packed_model.tensor_file import BrokenTensorFile, TensorFile

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def load(folder: str | os.PathLike[str]) -> Any:
    """The model of a folder that `fasttps.save` wrote, or of one of a checkpoint that is quantised.

    The latter as `fasttps.load_checkpoint` loads it, which takes options and gives the patch.

    The former is in eval mode, as fast as its modules are made: the weights are mapped, not read.

    It is patched, and has no patch to undo. Its Parameters ask for no gradient. The tokenizer is
    `transformers.AutoTokenizer.from_pretrained(folder)`'s. As long as the model lives, the files
    must stay as they are; `fasttps.save` over them does no harm.

    Raises:
        BrokenModel: no model was saved there, by this version, or its files do not fit together;
            a ValueError.
        OSError: a file cannot be read.
    """
    folder = Path(folder)
    if not is_packed_model(folder):
        from fasttps.checkpoint.schemes import is_quantized

        if is_quantized(folder):
            from fasttps.checkpoint.load import load_model

            return load_model(folder)
    manifest = read_manifest(folder / MANIFEST)
    tensors = _Tensors(folder, manifest)
    family, model = _skeleton(folder, manifest, len(tensors.files))
    steps = [_step(model, family, manifest, name) for name in manifest.modules]
    steps.sort(key=lambda step: bool(step.arguments))  # a tied embedding after its head
    with ExitStack() as changes:
        change_model(model, steps, (), changes)
        for step in steps:
            step.module.__class__ = step.fused
            if isinstance(step.module, PackedModule):
                step.module.prepare(step.options)
                _adopt(step, manifest.modules[step.name], tensors)
            else:
                step.module.fuse(step.options, **step.arguments)
        _fill(model, tensors)
        changes.pop_all()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


class _Tensors:
    """All tensors of the folder; each is taken once."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.files: dict[str, TensorFile] = {}
        for name in manifest.files:
            try:
                file = TensorFile(folder / name)
            except FileNotFoundError as error:
                raise BrokenModel(f"{folder} lacks {name}, which its {MANIFEST} lists") from error
            except BrokenTensorFile as error:
                raise BrokenModel(f"{folder / name} {error}") from error
            self.files.update(dict.fromkeys(file.names, file))

    def take(self, name: str, shape: tuple[int, ...] | None, *dtypes: torch.dtype) -> Tensor:
        """A tensor, of one of these types; `shape` None: of one dimension."""
        file = self.files.pop(name, None)
        if file is None:
            raise BrokenModel(f"{self.folder} lacks the tensor {name}")
        tensor = file.tensor(name)
        fits = tensor.dim() == 1 if shape is None else tuple(tensor.shape) == shape
        if not fits or tensor.dtype not in dtypes:
            raise BrokenModel(
                f"{self.folder} has {name} of the shape {list(tensor.shape)} in {tensor.dtype}; "
                f"{'[bytes]' if shape is None else list(shape)} in {dtypes[0]} was wanted"
            )
        return tensor


def _skeleton(folder: Path, manifest: Manifest, tensor_count: int) -> tuple[Any, Any]:
    """The family, and the unpatched model on the meta device, its buffers made."""
    from transformers import AutoConfig, GenerationConfig

    if manifest.module not in FAMILIES:
        raise BrokenModel(f"{folder} wanted a model of {list(FAMILIES)}, got {manifest.module}")
    kind = getattr(importlib.import_module(manifest.module), manifest.class_name, None)
    if not isinstance(kind, type) or not hasattr(kind, "config_class"):
        raise BrokenModel(f"{folder} wanted a model, got {manifest.module}.{manifest.class_name}")
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        if not isinstance(config, kind.config_class):
            raise BrokenModel(f"{folder} has the config of a {config.model_type}")
        if config.dtype not in _FLOATS:
            raise BrokenModel(f"{folder} wanted a float dtype in its config, got {config.dtype}")
        # Before a module is made for each: a config may state two billion.
        if config.num_hidden_layers > tensor_count:
            raise BrokenModel(
                f"{folder} has {tensor_count} tensors and states {config.num_hidden_layers} layers"
            )
        model = empty_model(kind, config)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(
                str(folder), local_files_only=True
            )
    except BrokenModel:
        raise
    except Exception as error:  # transformers raises nearly anything on a broken config
        raise BrokenModel(f"{folder} has a config that makes no model: {error}") from error
    return importlib.import_module(FAMILIES[manifest.module]), model


def _step(model: Any, family: Any, manifest: Manifest, name: str) -> Step:
    """A module that is to be fused, checked against the model."""
    saved = manifest.modules[name]
    known = (*family.FUSED, *getattr(family, "EMBEDDINGS", ()), PackedLinear, PackedEmbedding)
    classes = {fused.__name__: fused for fused in known}
    fused: type[FusedModule] | None = classes.get(saved.class_name)
    try:
        module = model.get_submodule(name)
        head: Any = None if saved.head is None else model.get_submodule(saved.head)
    except AttributeError as error:
        raise BrokenModel(f"{MANIFEST} names a module that the model has not: {error}") from error
    if fused is None or type(module) is not fused.replaces:
        raise BrokenModel(
            f"{MANIFEST} wanted a class for {type(module).__name__} {name}, got {saved.class_name}"
        )
    if issubclass(fused, PackedEmbedding) and not (
        type(head) in (nn.Linear, PackedLinear) and head.weight is module.weight
    ):
        raise BrokenModel(f"{MANIFEST} wanted the head that {name} is tied to, got {saved.head}")
    for key, value, choices in (
        ("kv", manifest.kv, KV_DTYPES),
        ("weights", saved.packing.weights, WEIGHTS),
    ):
        if value is not None and value not in choices:
            raise BrokenModel(f"{MANIFEST} wanted {key} of {list(choices)}, got {value!r}")
    packing = Packing(
        saved.packing.weights, saved.packing.group_size, saved.packing.int8_activation
    )
    kv = None if manifest.kv is None else KV_DTYPES[manifest.kv]
    arguments = {} if head is None else {"head": head}
    return Step(name, module, fused, Options(packing, kv), None, arguments=arguments)


def _adopt(step: Step, saved: SavedModule, tensors: _Tensors) -> None:
    """Give a module its packed buffers."""
    module: PackedModule = step.module
    if saved.buffers.keys() != {slot.buffer for slot in module.slots}:
        raise BrokenModel(f"{MANIFEST} gives {step.name} the buffers {list(saved.buffers)}")
    for slot in module.slots:
        buffer = saved.buffers[slot.buffer]
        packed = tensors.take(f"{step.name}.{slot.buffer}", None, torch.uint8)
        _check_packed(step.name, module, slot, buffer, packed)
        module.adopt(
            slot.buffer,
            packed,
            Packed(
                ops.PackedFormat[buffer.format],
                buffer.group_size,
                buffer.rows,
                buffer.cols,
                buffer.exact,
                buffer.int8_activation,
                inference=False,
                columns=_columns(f"{step.name}.{slot.buffer}{COLUMNS}", buffer, tensors),
            ),
        )


def _columns(name: str, buffer: SavedBuffer, tensors: _Tensors) -> Tensor | None:
    """The order of the columns of a buffer, if it has one."""
    if not buffer.columns:
        return None
    columns = tensors.take(name, (buffer.cols,), torch.int64)
    if not torch.equal(columns.sort().values, torch.arange(buffer.cols)):
        raise BrokenModel(f"{tensors.folder} has {name} that is no order of {buffer.cols} columns")
    return columns.clone()


def _check_packed(
    name: str, module: PackedModule, slot: Slot, buffer: SavedBuffer, packed: Tensor
) -> None:
    """Raise BrokenModel unless the ops would take the buffer for the weights of the model."""
    if buffer.format not in ops.PackedFormat.__members__:
        raise BrokenModel(f"{MANIFEST} gives {name} the unknown format {buffer.format!r}")
    shapes = {module.weight_shape(linear) for linear in slot.names}
    rows = buffer.rows * (2 if slot.halves else 1)
    if shapes != {(rows, buffer.cols)}:
        raise BrokenModel(
            f"{MANIFEST} gives {name} {rows} rows and {buffer.cols} cols, the model has "
            f"{sorted(shapes)}"
        )
    is_one = len(slot.names) == 1 and not slot.halves
    unpack: Any = ops.unpack_weight if is_one else ops.unpack_gate_up
    try:
        unpack(
            torch.empty(packed.numel(), dtype=torch.uint8, device="meta"),
            format=ops.PackedFormat[buffer.format],
            rows=buffer.rows,
            cols=buffer.cols,
            group_size=buffer.group_size,
        )
    except (ValueError, RuntimeError) as error:
        raise BrokenModel(f"{MANIFEST} does not fit the bytes of {name}: {error}") from error


def _fill(model: Any, tensors: _Tensors) -> None:
    """Give the Parameters that are not packed their values; nothing may be left over."""
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            value = tensors.take(name, tuple(parameter.shape), *_FLOATS)
            replace_parameter(model, parameter, nn.Parameter(value, requires_grad=False))
    if tensors.files:
        name = min(tensors.files)
        raise BrokenModel(f"{tensors.folder} has a tensor {name} that the model has no place for")
