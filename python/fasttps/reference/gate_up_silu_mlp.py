"""`gate_up_silu_mlp` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from . import quantized
from .attention import compute_dtype
from .pack_weight import INT8, unpack_gate_up, unpack_weight

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def gate_up_silu_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_format: int,
    down_format: int,
    intermediate_size: int,
    gate_up_group_size: int = 0,
    down_group_size: int = 0,
    activation: str = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    int8_activation: bool = False,
) -> Tensor:
    """(act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd with packed weights; out [..., hidden_size].

    float64 x is computed in float64 (with weights of any format); others in float32, with one
    rounding of the output to x's dtype; autocast changes nothing. With int8_activation, what meets
    a quantised weight is rounded to int8 first.
    """
    dtype = compute_dtype(x.dtype)
    hidden_size = x.size(-1)
    gate_weight, up_weight = unpack_gate_up(
        gate_up,
        format=gate_up_format,
        rows=intermediate_size,
        cols=hidden_size,
        group_size=gate_up_group_size,
    )
    down_weight = unpack_weight(
        down,
        format=down_format,
        rows=hidden_size,
        cols=intermediate_size,
        group_size=down_group_size,
    )

    def rounded(rows: Tensor, packed_format: int) -> Tensor:
        if int8_activation and packed_format >= INT8:
            return quantized.int8_activation(rows).to(dtype)
        return rows

    def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))

    with torch.autocast(x.device.type, enabled=False):
        rows = rounded(x.to(dtype), gate_up_format)
        gate, up = project(rows, gate_weight, gate_bias), project(rows, up_weight, up_bias)
        inner = rounded(ACTIVATIONS[activation](gate) * up, down_format)
        return project(inner, down_weight, down_bias).to(x.dtype)
