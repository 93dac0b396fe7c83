"""What `patch` was asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fasttps import ops

PARTS = ("attention", "mlp", "lm_head")
WEIGHTS = {
    "bf16": ops.PackedFormat.BF16,
    "int8": ops.PackedFormat.INT8,
    "int4": ops.PackedFormat.INT4,
}
KV_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
GROUP_SIZES = {
    "int8": (0, *ops.PackedFormat.INT8_GROUP.group_sizes),
    "int4": ops.PackedFormat.INT4.group_sizes,
}
DEFAULT_GROUP_SIZE = 32


@dataclass(frozen=True)
class Packing:
    """How the weights of a part are packed; `weights` None: as what they are."""

    weights: str | None = None
    group_size: int = 0
    int8_activation: bool = False
    keep_original: bool = False

    def format_of(self, dtype: torch.dtype) -> ops.PackedFormat:
        """The format for a weight of `dtype`."""
        if self.weights is None:
            return ops.PackedFormat.of(dtype)
        if self.weights == "int8" and self.group_size:
            return ops.PackedFormat.INT8_GROUP
        return WEIGHTS[self.weights]


@dataclass(frozen=True)
class Request:
    """`packings` of the parts that are wanted, and what caches hold (None: the keys' dtype).

    That of decode_step says only that it is wanted: it has no weights of its own.
    """

    packings: dict[str, Packing]
    kv: torch.dtype | None


@dataclass(frozen=True)
class Options:
    """What one module is told as it is fused."""

    packing: Packing
    kv: torch.dtype | None


def check_request(
    *,
    attention: Any = True,
    mlp: Any = True,
    lm_head: Any = True,
    decode_step: Any = True,
    weights: Any = None,
    group_size: Any = None,
    kv: Any = None,
    int8_activation: Any = None,
    keep_original: Any = False,
) -> Request:
    """The arguments of `patch`, with its defaults, as a Request.

    Raises:
        TypeError, ValueError: one of them is wrong, or has nothing to say with the others.
    """
    wanted = {"attention": attention, "mlp": mlp, "lm_head": lm_head}
    flags = {"attention": attention, "mlp": mlp, "decode_step": decode_step}
    for name, value in {**flags, "keep_original": keep_original}.items():
        _check_type(name, value, bool)
    _check_type("lm_head", lm_head, bool, str)
    _check_type("weights", weights, str, type(None))
    _check_type("group_size", group_size, int, type(None))
    _check_type("kv", kv, str, type(None))
    _check_type("int8_activation", int8_activation, bool, type(None))
    _check_choice("weights", weights, WEIGHTS)
    _check_choice("kv", kv, KV_DTYPES)
    kinds: dict[str, str | None] = {name: weights for name in PARTS if wanted[name] is not False}
    if isinstance(lm_head, str):
        _check_choice("lm_head", lm_head, WEIGHTS)
        kinds["lm_head"] = lm_head
    grouped = next((kind for kind in ("int4", "int8") if kind in kinds.values()), None)
    if group_size is not None:
        if grouped is None:
            raise ValueError(
                f"patch: group_size wanted None, for weights={weights!r} has no groups, "
                f"got {group_size}"
            )
        _check_choice("group_size", group_size, GROUP_SIZES[grouped])
    if int8_activation and not {"int8", "int4"} & set(kinds.values()):
        raise ValueError(
            f"patch: int8_activation wanted None or False with weights={weights!r}, which takes "
            "no int8 activations, got True"
        )
    if kv is not None and not attention:
        raise ValueError(f"patch: kv wanted None without the attention, got {kv!r}")
    packings = {
        name: Packing(
            kind,
            _group_size(kind, grouped, group_size),
            kind in ("int8", "int4") and int8_activation is not False,
            keep_original,
        )
        for name, kind in kinds.items()
    }
    if decode_step and len(kinds) == len(PARTS):  # a token as one op needs all of them
        packings["decode_step"] = Packing()
    return Request(packings, None if kv is None else KV_DTYPES[kv])


def _group_size(kind: str | None, grouped: str | None, asked: int | None) -> int:
    """Columns in a group; 0: a scale a row. What was asked for is for int4 if there is some."""
    if kind not in GROUP_SIZES:
        return 0
    return asked if asked is not None and kind == grouped else DEFAULT_GROUP_SIZE


def _check_type(name: str, value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise TypeError(f"patch: {name} wanted a {names}, got {type(value).__name__}")


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value is not None and value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"patch: {name} wanted one of {listed}, got {value!r}")
