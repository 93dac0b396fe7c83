"""A gated MLP over packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

_gate_up_silu_mlp = torch.ops.fasttps.gate_up_silu_mlp.default


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
    """(act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd.

    FastTPS's Fusion MLP (section 3.2, algorithm 4; equation 1): gate and up are one product over
    weights interlaced in half tiles, the activation and the multiplication happen in the
    registers, the down product follows.

    Args:
        x: [..., hidden_size], float32, bfloat16 or float16, with a dense last dimension.
        gate_up: uint8 from `pack_gate_up(gate, up)`, each [intermediate_size, hidden_size].
        down: uint8 from `pack_weight(down)`, [hidden_size, intermediate_size].
        gate_up_format, down_format: the `PackedFormat` of each: of x's dtype, or quantised.
        intermediate_size: rows of gate and of up.
        gate_up_group_size, down_group_size: as they were packed.
        activation: "silu", "gelu" or "gelu_tanh".
        gate_bias, up_bias: [intermediate_size]; down_bias: [hidden_size]; of x's dtype or
            float32. None: no bias.
        int8_activation: round what meets a quantised weight to int8, 32 columns at a time: faster
            where the CPU has byte products. Needs a quantised format.

    Returns:
        [..., hidden_size], contiguous, in x's dtype.

    Raises:
        ValueError: a shape, size, format, alignment or activation is wrong.
        TypeError: a dtype or device is wrong; a weight is not packed.
        RuntimeError: a gradient is asked for.
    """
    return _gate_up_silu_mlp(
        x,
        gate_up,
        down,
        gate_up_format=gate_up_format,
        down_format=down_format,
        intermediate_size=intermediate_size,
        gate_up_group_size=gate_up_group_size,
        down_group_size=down_group_size,
        activation=activation,
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=down_bias,
        int8_activation=int8_activation,
    )
