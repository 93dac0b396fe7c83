"""Least squares: whether time grows as theory says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Fit:
    """y = sum of coefficients[i] x^i, and the share of the variance that it explains."""

    coefficients: tuple[float, ...]
    r_squared: float


def fit(x: Sequence[float], y: Sequence[float], degree: int) -> Fit:
    """The polynomial of `degree` nearest to the points."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    scale = float(xs.max()) or 1.0  # well conditioned for any unit of x
    found = np.polynomial.polynomial.polyfit(xs / scale, ys, degree)
    rest = ys - np.polynomial.polynomial.polyval(xs / scale, found)
    total = float(((ys - ys.mean()) ** 2).sum())
    r_squared = 1.0 - float((rest**2).sum()) / total if total else 1.0
    return Fit(tuple(float(c) / scale**i for i, c in enumerate(found)), r_squared)


def curve_fits(records: Sequence[Mapping[str, Any]], parts: Iterable[str]) -> list[dict[str, Any]]:
    """Straight lines over the context: eager and ours, of each of bench_claims' curves."""
    found = []
    for part in parts:
        claims = [record for record in records if record["part"] == part]
        for weights in dict.fromkeys(claim["weights"] for claim in claims):
            points = [claim for claim in claims if claim["weights"] == weights]
            x = [point["context"] for point in points]
            for name in ("eager", "fasttps"):
                line = fit(x, [point[f"{name}_us"] for point in points], 1)
                found.append(
                    {
                        "benchmark": "claims",
                        "part": f"{part}-fit",
                        "shape": points[0]["shape"],
                        "weights": weights,
                        "of": name,
                        "coefficients_us": list(line.coefficients),
                        "r_squared": round(line.r_squared, 5),
                    }
                )
    return found


def show_curve_fits(lines: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table(title="straight lines over the context")
    for head in ("part", "shape", "weights", "of"):
        table.add_column(head)
    for head in ("at 0 µs", "µs a cached token", "R²"):
        table.add_column(head, justify="right")
    for line in lines:
        at_zero, slope = line["coefficients_us"]
        names = [line[key] for key in ("part", "shape", "weights", "of")]
        table.add_row(*names, f"{at_zero:,.1f}", f"{slope:.4f}", f"{line['r_squared']:.4f}")
    console.print(table)
