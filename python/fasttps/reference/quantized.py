"""Rounding weights and activations to the quantised formats, in plain PyTorch, to the bit.

Scales minimise the squared error of a group over a few candidates and least-squares fits. Sums run
over 16 lanes and are then halved, so that they round as the kernels' do.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lane_sum(terms: Tensor) -> Tensor:
    """The sum over the last dimension, a multiple of 16, in the kernels' order."""
    split = terms.unflatten(-1, (-1, 16))
    total = torch.zeros_like(split[..., 0, :])
    for i in range(split.size(-2)):
        total = total + split[..., i, :]
    while total.size(-1) > 1:
        low, high = total.chunk(2, -1)
        total = low + high
    return total.squeeze(-1)


def half(x: Tensor) -> Tensor:
    """x rounded to float16, in float32."""
    return x.half().float()


def quants(x: Tensor, d: Tensor, m: Tensor, least: float, most: float) -> Tensor:
    """round(clamp((x - m) / d)), 0 where d is 0; d and m have one element a group."""
    d, m = d.unsqueeze(-1), m.unsqueeze(-1)
    return torch.where(d == 0, 0.0, ((x - m) / d).clamp(least, most).round())


def squared_error(x: Tensor, q: Tensor, d: Tensor, m: Tensor) -> Tensor:
    error = x - (q * d.unsqueeze(-1) + m.unsqueeze(-1))
    return lane_sum(error * error)


def finite_groups(x: Tensor) -> Tensor:
    return x.isfinite().all(-1)


def range_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """(least, largest) of each group; a zero is +0, whatever signs its zeros have."""
    return x.amin(-1) + 0.0, x.amax(-1) + 0.0


def int4_levels(x: Tensor) -> tuple[Tensor, Tensor]:
    """(q in -8..7, d) of groups x [..., group_size].

    The element of largest magnitude lies at -7 to -9.5; then the best d for the best quants.
    """
    least, largest = range_of(x)
    extreme = torch.where(-least >= largest, least, largest)
    zero = torch.zeros_like(extreme)
    best = half(extreme / -7.0)
    error = squared_error(x, quants(x, best, zero, -8, 7), best, zero)

    def consider(d: Tensor, allowed: Tensor | bool = True) -> None:
        nonlocal best, error
        new = squared_error(x, quants(x, d, zero, -8, 7), d, zero)
        better = (new < error) & allowed
        best, error = torch.where(better, d, best), torch.where(better, new, error)

    for i in range(1, 11):
        consider(half(extreme / (-7.0 - 0.25 * i)))
    q = quants(x, best, zero, -8, 7)
    qq = lane_sum(q * q)
    consider(half(lane_sum(x * q) / qq), qq > 0)
    return quants(x, best, zero, -8, 7), best


def int4_min_levels(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q in 0..15, d, m) of groups x [..., group_size].

    The range is shrunk by up to a fifth; each is followed by two least-squares fits.
    """
    least, largest = range_of(x)
    width_of_all = largest - least
    middle = least + 0.5 * width_of_all
    best_d, best_m = torch.zeros_like(least), torch.zeros_like(least)
    error = torch.full_like(least, float("inf"))

    def consider(d: Tensor, m: Tensor, allowed: Tensor | bool = True) -> None:
        nonlocal best_d, best_m, error
        new = squared_error(x, quants(x, d, m, 0, 15), d, m)
        better = (new < error) & allowed
        best_d, best_m = torch.where(better, d, best_d), torch.where(better, m, best_m)
        error = torch.where(better, new, error)

    n = float(x.size(-1))
    sum_x = lane_sum(x)
    for i in range(5):
        factor = torch.tensor(1.0) - torch.tensor(0.05) * i
        width = width_of_all * factor
        d, m = half(width / 15.0), half(middle - 0.5 * width)
        consider(d, m)
        allowed = torch.ones_like(d, dtype=torch.bool)
        for _ in range(2):
            q = quants(x, d, m, 0, 15)
            sum_q, sum_qq, sum_xq = lane_sum(q), lane_sum(q * q), lane_sum(x * q)
            determinant = n * sum_qq - sum_q * sum_q
            allowed = allowed & (determinant > 0)
            d = half((n * sum_xq - sum_q * sum_x) / determinant)
            m = half((sum_qq * sum_x - sum_q * sum_xq) / determinant)
            consider(d, m, allowed)
    return quants(x, best_d, best_m, 0, 15), best_d, best_m


def int8_levels(x: Tensor, rounded: bool) -> tuple[Tensor, Tensor]:
    """(q in -127..127, d) of groups x [..., group_size]; d rounded to float16 or not."""
    d = x.abs().amax(-1) / 127.0
    d = half(d) if rounded else d
    return quants(x, d, torch.zeros_like(d), -127, 127), d


def int8_activation(x: Tensor) -> Tensor:
    """x [..., cols] rounded to int8 by 32 columns, in float32: what meets a quantised weight.

    32 columns that hold NaN or infinity are NaN.
    """
    runs = torch.nn.functional.pad(x.float(), (0, -x.size(-1) % 32)).unflatten(-1, (-1, 32))
    q, d = int8_levels(runs, rounded=False)
    d = torch.where(finite_groups(runs), d, torch.nan)
    return (q * d.unsqueeze(-1)).flatten(-2)[..., : x.size(-1)]
