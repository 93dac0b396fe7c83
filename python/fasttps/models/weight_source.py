"""Weights read again from where a model was loaded from, for the `undo` of a lossy patch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttps.models.fused_module import PatchError

_GGUF_MAGIC = b"GGUF"


class WeightSource:
    """A HuggingFace folder with safetensors, quantised or not, or a GGUF file; read by tensors."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Raises:
            PatchError: `path` is neither.
        """
        self.path = Path(path).resolve()
        self._read = self._open()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Whether the source, as it is now, has these weights.

        Raises:
            PatchError: one is missing, or of another shape.
        """
        self._read = self._open()
        for key, shape in shapes.items():
            found = self._read.shape(self._stored(key))
            if found != shape:
                raise PatchError(
                    f"patch: source {self.path} wanted {key} of shape {list(shape)}, got {found}"
                )

    def check_values(self, weights: Mapping[str, Tensor]) -> None:
        """Whether these weights are what `read` gives, bit for bit.

        Raises:
            PatchError: they are not: the model has changed since, or comes from elsewhere.
        """
        for key, weight in weights.items():
            read = self.read(key).to(weight.dtype)
            kind = {2: torch.int16, 4: torch.int32}[weight.element_size()]
            if not torch.equal(read.view(kind), weight.data.view(kind)):
                raise PatchError(
                    f"patch: source {self.path} wanted the values of the model, got others in {key}"
                )

    def read(self, key: str) -> Tensor:
        """A weight, in the dtype of the file."""
        return self._read.tensor(self._stored(key))

    def _open(self) -> Any:
        try:
            if self.path.is_dir():
                from fasttps.checkpoint.schemes import is_quantized

                if is_quantized(self.path):
                    return _Checkpoint(self.path)
                return _Safetensors(self.path)
            with self.path.open("rb") as file:
                magic = file.read(len(_GGUF_MAGIC))
            if magic == _GGUF_MAGIC:
                return _Gguf(self.path)
        except PatchError:
            raise
        except Exception as error:  # a broken file makes the readers raise nearly anything
            raise PatchError(f"patch: source {self.path} cannot be read: {error}") from error
        raise PatchError(f"patch: source {self.path} is neither a folder nor a GGUF file")

    def _stored(self, key: str) -> str:
        """How the file calls a weight: a model without a head has no prefix, a tied head no key."""
        base = key.removeprefix("model.")
        for name in (key, base, f"model.{base}"):
            if name in self._read.keys:
                return name
        if base == "lm_head.weight" and "model.embed_tokens.weight" in self._read.keys:
            return "model.embed_tokens.weight"
        raise PatchError(f"patch: source {self.path} wanted {key}, got no such weight")


class _Safetensors:
    """All safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files = [
            safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))
        ]
        self._file_of = {key: file for file in self._files for key in file.keys()}  # noqa: SIM118
        self.keys = frozenset(self._file_of)
        if not self.keys:
            raise PatchError(f"patch: source {folder} has no safetensors")

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file_of[key].get_slice(key).get_shape())

    def tensor(self, key: str) -> Tensor:
        return self._file_of[key].get_tensor(key)


class _Checkpoint:
    """A folder whose weights are quantised, each dequantised as it is asked for."""

    def __init__(self, folder: Path) -> None:
        from fasttps.checkpoint.load import open_folder

        model, self._tensors = open_folder(folder)
        parameters = model.named_parameters(remove_duplicate=False)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        self.keys = frozenset(self._shapes)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._shapes[key]

    def tensor(self, key: str) -> Tensor:
        values = self._tensors.values(key, self._shapes[key]).clone()
        self._tensors.forget()
        return values


class _Gguf:
    """A GGUF file, each tensor dequantised as it is asked for."""

    def __init__(self, path: Path) -> None:
        from fasttps.gguf.header import read_header
        from fasttps.gguf.load import open_file

        *_, self._tensors = open_file(path, read_header(path))
        self.keys = frozenset(self._tensors.places)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._tensors.places[key].shape

    def tensor(self, key: str) -> Tensor:
        return self._tensors.values(key)
