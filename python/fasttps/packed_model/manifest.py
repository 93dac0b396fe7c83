"""fasttps.json: which modules of a saved model are fused, and how their weights are packed.

{"format": 1, "packed_layout": 1, "fasttps": "0.1.0",
 "model": {"module": "transformers.models.llama.modeling_llama", "class": "LlamaForCausalLM"},
 "kv": null | "int8" | "bf16",
 "files": ["fasttps-00001-of-00001.safetensors"],
 "modules": {
   "model.layers.0.self_attn": {"class": "FusedLlamaAttention"},
   "model.layers.0.self_attn.q_proj": {"class": "PackedLinear",
     "packing": {"weights": "int4", "group_size": 32, "int8_activation": true},
     "buffers": {"weight_packed": {"format": "INT4", "group_size": 32, "rows": 2048, "cols": 2048,
                                   "exact": false, "int8_activation": true, "columns": false}}},
   "model.embed_tokens": {"class": "PackedEmbedding", "head": "lm_head"}, ...}}

The tensors are those of the buffers and of the Parameters that are not packed, by their names in
the model.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttps import ops
from fasttps.messages import OneLineError

MANIFEST = "fasttps.json"
COLUMNS = "_columns"  # after the name of a buffer: the order of its columns
FORMAT = 1
FILE_NAME = re.compile(r"fasttps-\d{5}-of-\d{5}\.safetensors")


class BrokenModel(OneLineError):
    """A folder is no saved model, or its files do not fit together."""


@dataclass(frozen=True)
class SavedBuffer:
    """What a packed buffer holds: the fields of `Packed`."""

    format: str
    group_size: int
    rows: int
    cols: int
    exact: bool
    int8_activation: bool
    columns: bool = False  # whether their order is a tensor too


@dataclass(frozen=True)
class SavedPacking:
    """How weights that come later are packed: the fields of `Packing`."""

    weights: str | None = None
    group_size: int = 0
    int8_activation: bool = False


@dataclass(frozen=True)
class SavedModule:
    """A fused module: the name of its class, and what that needs."""

    class_name: str
    packing: SavedPacking = SavedPacking()
    buffers: dict[str, SavedBuffer] = field(default_factory=dict)
    head: str | None = None


@dataclass(frozen=True)
class Manifest:
    """A whole fasttps.json; `module` and `class_name` are those of the unpatched model's class."""

    module: str
    class_name: str
    kv: str | None
    files: tuple[str, ...]
    modules: dict[str, SavedModule]

    def to_json(self, version: str) -> str:
        modules: dict[str, Any] = {}
        for name, saved in self.modules.items():
            entry: dict[str, Any] = {"class": saved.class_name}
            modules[name] = entry
            if saved.buffers:
                entry["packing"] = vars(saved.packing)
                entry["buffers"] = {key: vars(buffer) for key, buffer in saved.buffers.items()}
            if saved.head is not None:
                entry["head"] = saved.head
        return json.dumps(
            {
                "format": FORMAT,
                "packed_layout": ops.LAYOUT_VERSION,
                "fasttps": version,
                "model": {"module": self.module, "class": self.class_name},
                "kv": self.kv,
                "files": list(self.files),
                "modules": modules,
            },
            indent=1,
        )


def is_packed_model(folder: Path) -> bool:
    """Whether `folder` has a fasttps.json."""
    return (folder / MANIFEST).is_file()


def read_manifest(path: Path) -> Manifest:
    """
    Raises:
        BrokenModel: there is none, it is of another version, or a field of it makes no sense.
    """
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenModel(f"{path.parent} has no {path.name}: no model was saved there") from error
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path} is no JSON: {error}") from error
    read = _Reader(path, text)
    for key, ours in (("format", FORMAT), ("packed_layout", ops.LAYOUT_VERSION)):
        if (theirs := read.get(text, key, int)) != ours:
            raise BrokenModel(
                f"{path} wanted {key} {ours}, got {theirs}: it was saved by another version of "
                "fasttps; quantize the model again"
            )
    model = read.get(text, "model", dict)
    files = tuple(read.get(text, "files", list))
    if not files or not all(isinstance(name, str) and FILE_NAME.fullmatch(name) for name in files):
        raise BrokenModel(f"{path} wanted names of files in this folder, got {list(files)}")
    return Manifest(
        read.get(model, "module", str),
        read.get(model, "class", str),
        read.get(text, "kv", str, type(None)),
        files,
        {name: read.module(name, entry) for name, entry in read.get(text, "modules", dict).items()},
    )


class _Reader:
    """Reads fields by their type."""

    def __init__(self, path: Path, text: Any) -> None:
        self._path = path
        if not isinstance(text, dict):
            raise BrokenModel(f"{path} is no JSON object")

    def get(self, where: Any, key: str, *kinds: type) -> Any:
        value = where.get(key) if isinstance(where, dict) else None
        if type(value) not in kinds:
            names = " or ".join(kind.__name__ for kind in kinds)
            raise BrokenModel(f"{self._path} wanted {key} of type {names}, got {value!r}")
        return value

    def module(self, name: str, entry: Any) -> SavedModule:
        class_name = self.get(entry, "class", str)
        head = self.get(entry, "head", str, type(None))
        if "buffers" not in entry:
            return SavedModule(class_name, head=head)
        packing = self.get(entry, "packing", dict)
        return SavedModule(
            class_name,
            SavedPacking(
                self.get(packing, "weights", str, type(None)),
                self.get(packing, "group_size", int),
                self.get(packing, "int8_activation", bool),
            ),
            {
                key: SavedBuffer(
                    self.get(buffer, "format", str),
                    self.get(buffer, "group_size", int),
                    self.get(buffer, "rows", int),
                    self.get(buffer, "cols", int),
                    self.get(buffer, "exact", bool),
                    self.get(buffer, "int8_activation", bool),
                    self.get({"columns": False, **buffer}, "columns", bool),
                )
                for key, buffer in self.get(entry, "buffers", dict).items()
            },
            head,
        )
