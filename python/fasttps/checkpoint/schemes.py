"""The scheme that a folder states, and what of it is read here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fasttps.checkpoint.weights import QuantizedWeight
from fasttps.messages import OneLineError

# Older folders have the config of the scheme in a file of its own.
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


class BrokenCheckpoint(OneLineError):
    """The files of a folder do not fit together, or one is cut short."""


class UnsupportedCheckpoint(OneLineError):
    """A folder whose weights are quantised by a scheme that is not read here."""


class Part(NamedTuple):
    """What a tensor of a quantised weight must be; a dimension of -1 may be anything."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    needed: bool = True


class Parts(Protocol):
    """The tensors of one weight, by the names of their parts."""

    def has(self, part: str) -> bool: ...
    def shape(self, part: str) -> tuple[int, ...]: ...
    def read(self, part: str) -> torch.Tensor: ...


class Scheme(Protocol):
    """How the quantised weights of a folder lie in its files."""

    marker: str  # the part that every quantised weight has, and no other
    suffixes: tuple[str, ...]  # all parts, the marker among them

    def parts(self, name: str, rows: int, cols: int, has: Parts) -> list[Part]:
        """What the tensors of the linear `name` must be."""
        ...

    def read(self, name: str, rows: int, cols: int, parts: Parts) -> QuantizedWeight:
        """A weight whose parts have been checked."""
        ...


def quantization_config(folder: Path) -> dict[str, Any] | None:
    """What a folder says of its quantisation; None if nothing.

    Raises:
        BrokenCheckpoint: its config is no JSON object.
        OSError: it cannot be read.
    """
    config = json_object(folder / "config.json")
    found = config.get("quantization_config")
    if found is None:
        found = config.get("compression_config")  # compressed-tensors, once
    if found is not None:
        if not isinstance(found, dict):
            raise BrokenCheckpoint(f"has a quantization_config that is no object: {found!r}")
        return found
    for name, method in _OWN_FILES.items():
        if (folder / name).is_file():
            return {"quant_method": method, **json_object(folder / name)}
    return None


def is_quantized(folder: Path) -> bool:
    """Whether `folder` is one of transformers that states a quantisation, of any scheme."""
    return (folder / "config.json").is_file() and quantization_config(folder) is not None


def scheme_of(config: dict[str, Any]) -> Scheme:
    """The reader of a scheme.

    Raises:
        UnsupportedCheckpoint: there is none.
        BrokenCheckpoint: the config makes no sense.
    """
    from fasttps.checkpoint.awq import Awq
    from fasttps.checkpoint.compressed_tensors import CompressedTensors
    from fasttps.checkpoint.gptq import Gptq

    method = config.get("quant_method")
    readers = {"awq": Awq, "gptq": Gptq, "compressed-tensors": CompressedTensors}
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    if method not in readers:
        known = ", ".join(readers)
        bits = [bits for bits in (4, 8) if config.get(f"load_in_{bits}bit")]
        name = f"{method} ({bits[0]} bits)" if bits else str(method)
        raise UnsupportedCheckpoint(f"is quantised by {name}, and only {known} are read")
    reader: Any = readers[method]
    return reader(config)


def integer(config: dict[str, Any], key: str, default: Any = None) -> int:
    """A whole number of a config.

    Raises:
        BrokenCheckpoint: it is none.
    """
    value = config.get(key, default)
    if type(value) is not int:
        raise BrokenCheckpoint(f"has a quantization_config with {key} = {value!r}")
    return value


def json_object(path: Path) -> dict[str, Any]:
    """A JSON file that is an object.

    Raises:
        BrokenCheckpoint: it is not.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"has a {path.name} that is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BrokenCheckpoint(f"has a {path.name} that is no JSON object")
    return found


def in_groups(name: str, weight: QuantizedWeight, index: torch.Tensor | None) -> QuantizedWeight:
    """A weight whose columns lie in their own order, brought into that of their groups.

    index: [cols], the group of each column; None: they follow each other.

    Raises:
        BrokenCheckpoint: it names groups that the weight has not.
    """
    cols, groups = weight.quants.shape[1], weight.scales.shape[1]
    places = torch.arange(cols) // weight.group
    if index is None or torch.equal(index := index.long(), places):
        return weight
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise BrokenCheckpoint(f"has {name}.g_idx with groups that it has not")
    columns = index.argsort(stable=True)
    if torch.equal(index[columns], places):
        return replace(weight, quants=_gathered(weight.quants, columns), columns=columns)
    # Groups of several sizes: each column has one of its own, which no format holds.
    zeros = None if weight.zeros is None else weight.zeros[:, index]
    return replace(weight, scales=weight.scales[:, index], zeros=zeros, group=1)


def _gathered(quants: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """quants[:, columns], along the memory where columns lie in one piece."""
    if quants.stride(0) == 1:
        return quants.t().index_select(0, columns).t()
    return quants.index_select(1, columns)
