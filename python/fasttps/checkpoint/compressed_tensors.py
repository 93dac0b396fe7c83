"""What compressed-tensors writes: int4 and int8 weights, a scale for a row, a group or all.

    pack-quantized   weight_packed      int32 [rows, cols bits / 32], of q + 2^(bits - 1)
                     weight_zero_point  int32 [rows bits / 32, groups] of z + 2^(bits - 1), or int8
                                        [rows, groups] of z, where there are some
                     weight_shape       int64 [2]: rows, cols
                     weight_g_idx       int32 [cols]: the group of each column, with act-order
    int-quantized    weight             int8 [rows, cols]
                     weight_zero_point  int8 [rows, groups]
    both             weight_scale       [rows, groups]

Activations that are rounded to int8 as they come are rounded as `int8_activation` does, in smaller
groups.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttps.checkpoint.awq import FLOATS
from fasttps.checkpoint.schemes import (
    BrokenCheckpoint,
    Part,
    Parts,
    UnsupportedCheckpoint,
    in_groups,
    integer,
)
from fasttps.checkpoint.weights import QuantizedWeight
from fasttps.checkpoint.words import along_cols, along_rows

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")


class _Group(NamedTuple):
    """What a config says of the linears that `targets` names."""

    targets: tuple[str, ...]
    bits: int
    group: int  # 0: a scale a row or one for all


class CompressedTensors:
    """The reader of one folder."""

    marker = "weight_scale"
    suffixes = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight",
    )

    def __init__(self, config: dict[str, Any]) -> None:
        """
        Raises:
            UnsupportedCheckpoint: a format, a type or a number of bits that is not read.
            BrokenCheckpoint: the config makes no sense.
        """
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise BrokenCheckpoint("has a quantization_config without config_groups")
        for key in ("kv_cache_scheme", "transform_config"):
            if config.get(key):
                raise UnsupportedCheckpoint(f"is compressed-tensors with a {key}")
        sparsity = config.get("sparsity_config") or {}
        if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            raise UnsupportedCheckpoint(f"is compressed-tensors of the {sparsity['format']} format")
        self._groups = [_group(group, config.get("format")) for group in groups.values()]

    def parts(self, name: str, rows: int, cols: int, has: Parts) -> list[Part]:
        of = self._of(name)
        groups = -(-cols // of.group) if of.group else 1
        scales = ((rows, groups), (1,), (1, 1)) if groups == 1 else ((rows, groups),)
        found = [Part("weight_scale", FLOATS, scales)]
        zeros: tuple[tuple[int, ...], ...] = scales
        if has.has("weight_packed"):
            words = -(-cols * of.bits // 32)
            found.append(Part("weight_packed", (torch.int32,), ((rows, words),)))
            found.append(Part("weight_shape", (torch.int64, torch.int32), ((2,),), needed=False))
            zeros += ((-(-rows * of.bits // 32), groups),)
        else:
            found.append(Part("weight", (torch.int8,), ((rows, cols),)))
        found.append(Part("weight_zero_point", (torch.int32, torch.int8), zeros, needed=False))
        found.append(Part("weight_g_idx", (torch.int32, torch.int64), ((cols,),), needed=False))
        return found

    def read(self, name: str, rows: int, cols: int, parts: Parts) -> QuantizedWeight:
        of = self._of(name)
        centre = 1 << of.bits - 1
        if parts.has("weight_packed"):
            quants = along_rows(parts.read("weight_packed"), of.bits)[:, :cols]
        else:
            quants = _unsigned(parts.read("weight"), centre)
        if parts.has("weight_shape") and parts.read("weight_shape").tolist() != [rows, cols]:
            shape = parts.read("weight_shape").tolist()
            raise BrokenCheckpoint(f"has {name} of the shape {shape}, not {[rows, cols]}")
        scales = parts.read("weight_scale").reshape(-1, parts.shape("weight_scale")[-1])
        scales = scales.expand(rows, -1)
        zeros = None
        if parts.has("weight_zero_point"):
            zeros = parts.read("weight_zero_point")
            if zeros.dtype == torch.int32:
                zeros = along_cols(zeros, of.bits)[:rows]
            else:
                zeros = _unsigned(zeros, centre).reshape(-1, zeros.shape[-1]).expand(rows, -1)
        return in_groups(
            name,
            QuantizedWeight(of.bits, quants, scales, zeros, of.group or cols),
            parts.read("weight_g_idx") if parts.has("weight_g_idx") else None,
        )

    def _of(self, name: str) -> _Group:
        """The group of a linear: one that names it goes before one of its class."""
        for group in self._groups:
            if any(_matches(target, name) for target in group.targets):
                return group
        for group in self._groups:
            if "Linear" in group.targets:
                return group
        raise BrokenCheckpoint(f"has a quantised {name}, which no group of its config is for")


def _group(group: Any, form: Any) -> _Group:
    """One of `config_groups`, checked."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise BrokenCheckpoint(f"has a config group without weights: {group!r}")
    weights = group["weights"]
    form = group.get("format") or form
    kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    if form not in _FORMATS or kind != "int" or bits not in (4, 8):
        raise UnsupportedCheckpoint(
            f"is compressed-tensors of the {form} format in {kind} of {bits} bits; those of int of "
            "4 or 8 bits in pack-quantized and int-quantized are read"
        )
    if strategy not in ("group", "channel", "tensor"):
        raise UnsupportedCheckpoint(f"is compressed-tensors with a scale a {strategy}")
    activations = group.get("input_activations")
    if activations and not (
        isinstance(activations, dict)
        and activations.get("dynamic") is True
        and (activations.get("type"), activations.get("num_bits")) == ("int", 8)
    ):
        raise UnsupportedCheckpoint("is compressed-tensors with quantised activations")
    size = integer(weights, "group_size") if strategy == "group" else 0
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise BrokenCheckpoint(f"has a config group with the targets {targets!r}")
    return _Group(tuple(targets), bits, max(size, 0))


def _matches(target: str, name: str) -> bool:
    """Whether a target names a linear: "re:..." by its beginning."""
    if target.startswith("re:"):
        try:
            return re.match(target[3:], name) is not None
        except re.error as error:
            raise BrokenCheckpoint(f"has a config group with the target {target!r}") from error
    return target == name


def _unsigned(signed: Tensor, centre: int) -> Tensor:
    """int8 q as uint8 q + centre."""
    return (signed.short() + centre).to(torch.uint8)
