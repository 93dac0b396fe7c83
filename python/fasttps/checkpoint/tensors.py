"""The tensors of a folder by the names that the model has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasttps.checkpoint.schemes import (
    BrokenCheckpoint,
    Scheme,
    UnsupportedCheckpoint,
    json_object,
)
from fasttps.checkpoint.weights import QuantizedWeight
from fasttps.packed_model.tensor_file import BrokenTensorFile, TensorFile

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Of older checkpoints, whose values a model computes itself.
_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class Tensors:
    """The tensors of a folder, read when they are asked for.

    Attributes:
        folder: where they are.
        quantized: names of the linears whose weights are quantised.
        plain: names of the other tensors.
        tied: of parameters that `check_fits` found to be others' too: those.
    """

    def __init__(self, folder: Path, scheme: Scheme) -> None:
        """
        Raises:
            BrokenCheckpoint: a file is cut short or missing.
            UnsupportedCheckpoint: it has no safetensors.
        """
        self.folder = folder
        self.tied: dict[str, str] = {}
        self._scheme = scheme
        self._files: list[TensorFile] = []
        self._file_of: dict[str, TensorFile] = {}
        for path in _files(folder):
            try:
                file = TensorFile(path)
            except BrokenTensorFile as error:
                raise BrokenCheckpoint(f"has {path.name}, which {error}") from error
            self._files.append(file)
            self._file_of.update(dict.fromkeys(file.names, file))
        if not self._files:
            raise UnsupportedCheckpoint("has no safetensors, and no other weights are read")
        marker = f".{scheme.marker}"
        names = self._file_of.keys()
        self.quantized = frozenset(n.removesuffix(marker) for n in names if n.endswith(marker))
        parts = {f"{name}.{part}" for name in self.quantized for part in scheme.suffixes}
        self.plain = frozenset(n for n in names - parts if not n.endswith(_COMPUTED))
        if not self.quantized:
            raise BrokenCheckpoint("states a quantisation and has no quantised weight")

    def check_fits(self, model: nn.Module) -> None:
        """Hold the tensors against the parameters of a model; all but what is tied must be there.

        A bias that is in the file alone and is zero is left out, another is given to its linear.

        Raises:
            BrokenCheckpoint: one is missing, too many, or of another shape or type.
        """
        self._take_biases(model)
        quantized = {f"{name}.weight" for name in self.quantized}
        self.tied = {name: first for first, *names in _tied(model) for name in names}
        tied = self.tied.keys()
        if tied & quantized:
            raise UnsupportedCheckpoint(f"has a quantised {min(tied & quantized)} that is tied")
        linears = {name: module for name, module in model.named_modules() if _is_linear(module)}
        for name in sorted(self.quantized):
            if name not in linears and ".experts." in name:
                raise UnsupportedCheckpoint(f"has quantised experts, such as {name}")
            if name not in linears:
                raise BrokenCheckpoint(f"has a quantised {name} that the model has no place for")
            self._check_parts(name, *linears[name].weight.shape)
        expected = dict(model.named_parameters(remove_duplicate=False))
        for name in sorted(self.plain - tied):
            if name not in expected:
                raise BrokenCheckpoint(f"has a tensor {name} that the model has no place for")
            self._check(name, _FLOATS, (tuple(expected[name].shape),))
        missing = sorted(expected.keys() - self.plain - quantized - tied)
        if missing:
            raise BrokenCheckpoint(
                f"lacks {len(missing)} of the model's weights, such as {missing[0]}"
            )

    def weight(self, name: str, rows: int, cols: int) -> QuantizedWeight:
        """That of a linear.

        Raises:
            BrokenCheckpoint: its values make no sense.
        """
        return self._scheme.read(name, rows, cols, _Parts(self, name))

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is in its file: over the mapped file, until `forget`."""
        return self._file_of[name].tensor(name, alignment_bytes=1)

    def values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter, dequantised if need be."""
        return self.rows(name, shape)(slice(None))

    def rows(self, name: str, shape: tuple[int, ...]) -> Callable[[slice], Tensor]:
        """What gives some rows of a parameter, dequantised if need be."""
        name = self.tied.get(name, name)
        linear = name.removesuffix(".weight")
        if linear in self.quantized:
            weight = self.weight(linear, *shape)
            return lambda rows: weight.rows(rows).values()
        return lambda rows: self.tensor(name)[rows]

    def has(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].shape(name)

    def forget(self) -> None:
        """Let go of the memory that holds pages of the files."""
        for file in self._files:
            file.forget()

    def _check_parts(self, name: str, rows: int, cols: int) -> None:
        for part in self._scheme.parts(name, rows, cols, _Parts(self, name)):
            key = f"{name}.{part.name}"
            if self.has(key):
                self._check(key, part.dtypes, part.shapes)
            elif part.needed:
                raise BrokenCheckpoint(f"lacks the tensor {key}")

    def _check(
        self, key: str, dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...]
    ) -> None:
        shape, dtype = self.shape(key), self._file_of[key].dtype(key)
        fits = (
            len(shape) == len(wanted) and all(w in (-1, size) for w, size in zip(wanted, shape))
            for wanted in shapes
        )
        if not any(fits) or dtype not in dtypes:
            raise BrokenCheckpoint(
                f"has {key} of the shape {list(shape)} in {dtype}; {list(shapes[0])} in "
                f"{dtypes[0]} was wanted"
            )

    def _take_biases(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        for key in sorted(self.plain):
            name, _, kind = key.rpartition(".")
            if kind != "bias" or name not in self.quantized:
                continue
            linear: Any = modules.get(name)
            if not _is_linear(linear) or linear.bias is not None:
                continue
            self._check(key, _FLOATS, ((linear.weight.shape[0],),))
            if bool((self.tensor(key) == 0).all()):
                self.plain -= {key}
            else:
                linear.bias = nn.Parameter(linear.weight.new_empty(linear.weight.shape[0]))


def _files(folder: Path) -> list[Path]:
    """The files of the weights: those of an index, or the one of the usual name, or all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = json_object(index).get("weight_map")
        names = list(places.values()) if isinstance(places, dict) else [""]
        if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
            raise BrokenCheckpoint(f"has an {index.name} without names of files in this folder")
        listed = [folder / str(name) for name in sorted(set(names))]
        for path in listed:
            if not path.is_file():
                raise BrokenCheckpoint(f"lacks {path.name}, which its {index.name} lists")
        return listed
    usual = folder / "model.safetensors"
    return [usual] if usual.is_file() else sorted(folder.glob("*.safetensors"))


class _Parts:
    """The tensors of one quantised weight."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        self._tensors, self._name = tensors, name

    def has(self, part: str) -> bool:
        return self._tensors.has(f"{self._name}.{part}")

    def shape(self, part: str) -> tuple[int, ...]:
        key = f"{self._name}.{part}"
        if not self._tensors.has(key):
            raise BrokenCheckpoint(f"lacks the tensor {key}")
        return self._tensors.shape(key)

    def read(self, part: str) -> Tensor:
        return self._tensors.tensor(f"{self._name}.{part}")


def _is_linear(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear


def _tied(model: nn.Module) -> Iterator[list[str]]:
    """Names of one Parameter, where it has several; the first is the one that files have."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return (found for found in names.values() if len(found) > 1)
