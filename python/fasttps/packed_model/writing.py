"""`fasttps.save`: a patched model into a folder."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasttps._version import __version__
from fasttps.models.fused_module import FusedModule
from fasttps.models.packed_linear import PackedEmbedding
from fasttps.models.packed_module import PackedModule
from fasttps.models.patch import Patch
from fasttps.models.patch_options import KV_DTYPES
from fasttps.packed_model.manifest import (
    COLUMNS,
    FILE_NAME,
    MANIFEST,
    Manifest,
    SavedBuffer,
    SavedModule,
    SavedPacking,
)
from fasttps.packed_model.tensor_file import write_tensors

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_FILE_BYTES = 5 << 30
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_UNFINISHED = ".unfinished"  # the folder of what is being written
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.safetensors.index.json")

# What `save` calls as it advances: files written, files in all, the name of the one just written.
Progress = Callable[[int, int, str], None]


def save(
    model: nn.Module | Patch,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a patched model, its weights as they are packed, for `fasttps.load`.

    Args:
        model: patched, or the patch of one.
        folder: made if it is not there; a model that was saved there is replaced, once the new
            one is written: until then the folder holds both, and after an error the old one.
        tokenizer: of transformers, saved too. By default the files of the folder that the model
            was loaded from are copied.
        max_file_bytes: where a new file begins; a tensor is never cut.
        progress: called after each file with (files written, files in all, its name).

    Raises:
        ValueError: the model is not patched or has weights of another type than float32, bfloat16
            and float16, or `folder` holds another model.
        TypeError: `model` is neither a model nor a patch.
    """
    if isinstance(model, Patch):
        model = model.model
    if not isinstance(model, nn.Module):
        raise TypeError(f"save: model wanted a patched model, got {type(model).__name__}")
    if not any(isinstance(module, FusedModule) for module in model.modules()):
        raise ValueError(f"save: model wanted a patched one, got a plain {type(model).__name__}")
    folder = Path(folder)
    check_folder(folder)
    files = list(_files(_tensors(model), max_file_bytes))
    names = [f"fasttps-{at:05}-of-{len(files):05}.safetensors" for at in range(1, len(files) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    try:
        unfinished.mkdir()
        for done, (name, tensors) in enumerate(zip(names, files), start=1):
            write_tensors(unfinished / name, tensors)
            if progress is not None:
                progress(done, len(files), name)
        _save_config(model, unfinished, tokenizer)
        kind: Any = type(model).replaces if isinstance(model, FusedModule) else type(model)
        text = Manifest(kind.__module__, kind.__name__, _kv(model), tuple(names), _modules(model))
        (unfinished / MANIFEST).write_text(text.to_json(__version__), encoding="utf-8")
        _take_place(unfinished, folder)
        for old in folder.glob("fasttps-*.safetensors"):
            if old.name not in names:
                old.unlink()
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _take_place(unfinished: Path, folder: Path) -> None:
    """Move all files of a saved model into `folder`.

    The manifest goes first and comes last, so that a folder that has it is whole.
    """
    new = [path.relative_to(unfinished) for path in unfinished.rglob("*") if path.is_file()]
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in sorted(new, key=lambda path: path.name == MANIFEST):
        (folder / path.parent).mkdir(exist_ok=True)
        os.replace(unfinished / path, folder / path)


def check_folder(folder: Path) -> None:
    """
    Raises:
        ValueError: a model cannot be saved there, for `folder` holds another, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"save: folder wanted a folder, got the file {folder}")
    for pattern in _WEIGHT_FILES:
        for file in folder.glob(pattern):
            if not FILE_NAME.fullmatch(file.name):
                raise ValueError(f"save: folder wanted one without a model, got {file}")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """What the model holds: packed buffers, and the Parameters that are not packed."""
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, PackedModule):
            for slot in module.slots:
                buffer = module._buffers.get(slot.buffer)
                if buffer is None:
                    raise ValueError(f"save: model wanted packed weights, {name}: {module!r}")
                tensors[prefix + slot.buffer] = buffer
                columns = module.__dict__["packed"][slot.buffer].columns
                if columns is not None:
                    tensors[prefix + slot.buffer + COLUMNS] = columns
        elif module._buffers.keys() - module._non_persistent_buffers_set:
            raise ValueError(f"save: model wanted no buffers of its own, got some in {name}")
    for name, parameter in model.named_parameters():
        if parameter.dtype not in FLOATS:
            raise ValueError(
                f"save: model wanted float32, bfloat16 or float16 weights, {name} is "
                f"{parameter.dtype}"
            )
        if parameter.numel():
            tensors[name] = parameter.data
    return tensors


def _files(tensors: dict[str, Tensor], max_file_bytes: int) -> Iterator[dict[str, Tensor]]:
    file: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if file and size + tensor.nbytes > max_file_bytes:
            yield file
            file, size = {}, 0
        file[name] = tensor
        size += tensor.nbytes
    yield file


def _modules(model: nn.Module) -> dict[str, SavedModule]:
    names = {id(module): name for name, module in model.named_modules()}
    saved = {}
    for name, module in model.named_modules():
        if not isinstance(module, FusedModule):
            continue
        packing, buffers, head = SavedPacking(), {}, None
        if isinstance(module, PackedModule):
            asked = module.__dict__["packing"]
            packing = SavedPacking(asked.weights, asked.group_size, asked.int8_activation)
            buffers = {
                buffer: SavedBuffer(
                    kind.format.name,
                    kind.group_size,
                    kind.rows,
                    kind.cols,
                    kind.exact,
                    kind.int8_activation,
                    kind.columns is not None,
                )
                for buffer, kind in module.__dict__["packed"].items()
            }
        elif isinstance(module, PackedEmbedding):
            head = names[id(module.head)]
        saved[name] = SavedModule(type(module).__name__, packing, buffers, head)
    return saved


def _kv(model: nn.Module) -> str | None:
    """The `kv` that the model was patched with."""
    held = {module.__dict__.get("kv") for module in model.modules()} - {None}
    return next((name for name, dtype in KV_DTYPES.items() if dtype in held), None)


def _save_config(model: Any, folder: Path, tokenizer: Any) -> None:
    config = copy.deepcopy(model.config)
    kind = type(model).replaces if isinstance(model, FusedModule) else type(model)
    config.architectures = [kind.__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        return
    origin = Path(getattr(model, "name_or_path", "") or "")
    if origin.is_dir() and origin.resolve() != folder.resolve():
        for name in TOKENIZER_FILES:
            if (origin / name).is_file():
                shutil.copyfile(origin / name, folder / name)
