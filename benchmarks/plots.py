"""Pictures of what the benchmarks measured; matplotlib is imported when one is drawn."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMS = (".png", ".svg", ".pdf")
COLUMNS = 4
EAGER_COLOUR = "tab:orange"
COLOURS = {"": "tab:green", "bf16": "tab:green", "int4": "tab:blue"}  # ours, by weights
Record = Mapping[str, Any]


def add_option(options: argparse.ArgumentParser) -> None:
    forms = ", ".join(FORMS)
    options.add_argument("--plot", type=Path, metavar="FILE", help=f"draw the curves; {forms}")


def check_option(options: argparse.ArgumentParser, file: Path | None) -> None:
    """End the program, before anything is measured, if `file` could not be drawn."""
    if file is None:
        return
    if file.suffix not in FORMS:
        options.error(f"--plot wanted a name ending in {', '.join(FORMS)}, got {file}")
    if importlib.util.find_spec("matplotlib") is None:
        options.error("--plot: matplotlib is not installed; pip install matplotlib brings it")


class Sheet:
    """A figure of panels, side by side, saved to a file."""

    def __init__(self, count: int) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        self.pyplot = pyplot
        columns = min(COLUMNS, max(count, 1))
        rows = max(-(-count // columns), 1)
        self.figure, axes = pyplot.subplots(
            rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False
        )
        for axis in axes.flat[count:]:
            axis.remove()
        self._axes = iter(axes.flat)

    def panel(self, title: str) -> Any:
        axis = next(self._axes)
        axis.set_title(title, fontsize=9)
        return axis

    def save(self, file: Path, title: str) -> None:
        self.figure.suptitle(title, fontsize=10)
        self.figure.tight_layout()
        file.parent.mkdir(parents=True, exist_ok=True)
        self.figure.savefig(file, dpi=100)
        self.pyplot.close(self.figure)


def polynomial(axis: Any, x: Sequence[float], coefficients_us: Sequence[float], **how: Any) -> None:
    """A fit, from 0 to the largest x, in ms."""
    smooth = np.linspace(0, max(x), 200)
    fitted = np.polynomial.polynomial.polyval(smooth, np.asarray(coefficients_us))
    axis.plot(smooth, fitted / 1e3, linewidth=1, **how)


def scaling(records: Sequence[Record], file: Path, title: str) -> None:
    """bench_scaling: a panel a series, with its fit."""
    sheet = Sheet(len(records))
    for record in records:
        slope = f", slope {record['slope']:g} {record['slope_unit']}" if "slope" in record else ""
        axis = sheet.panel(f"{record['what']}\nR² {record['r_squared']:.4f}{slope}")
        polynomial(axis, record["x"], record["coefficients_us"], color="tab:gray")
        axis.plot(record["x"], np.asarray(record["us"]) / 1e3, "o", color="tab:green")
        axis.set(xlabel=record["grows"], ylabel="ms", xlim=(0, None), ylim=(0, None))
    sheet.save(file, title)


def claims(records: Sequence[Record], fits: Sequence[Record], file: Path, title: str) -> None:
    """bench_claims: each curve as less time (Figure 6), speed-up and times, and MLPs (Figure 7)."""
    curves = {"curve": "attention", "model-curve": "4 layers and the head"}
    here = [part for part in curves if any(record["part"] == part for record in records)]
    mlps = [record for record in records if record["part"] == "mlp"]
    sheet = Sheet(3 * len(here) + bool(mlps))
    for part in here:
        points = [record for record in records if record["part"] == part]
        lines = [line for line in fits if line["part"] == f"{part}-fit"]
        name = f"{curves[part]}, {points[0]['shape']}, one token"
        reductions(sheet.panel(f"{name}\nagainst eager (Figure 6)"), points, lines)
        ratios(sheet.panel(f"{name}\nagainst eager; dashed: what the bytes allow"), points)
        times(sheet.panel(f"{name}\nfitted by straight lines"), points, lines)
    if mlps:
        bars(sheet.panel("MLP of one token (Figure 7)\nx: eager over ours"), mlps)
    sheet.save(file, title)


def by_weights(points: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for point in points:
        found.setdefault(point["weights"], []).append(point)
    return found


def reductions(axis: Any, points: Sequence[Record], lines: Sequence[Record]) -> None:
    """Less time than eager, and what the two fitted lines say of it."""
    for weights, some in by_weights(points).items():
        x = [point["context"] for point in some]
        colour = COLOURS[weights]
        less = [100 * point["reduction"] for point in some]
        axis.plot(x, less, "o", color=colour, label=f"fasttps {weights}".strip())
        of = {line["of"]: line["coefficients_us"] for line in lines if line["weights"] == weights}
        smooth = np.linspace(min(x), max(x), 200)
        ours, eager = (
            np.polynomial.polynomial.polyval(smooth, np.asarray(of[name]))
            for name in ("fasttps", "eager")
        )
        # A line of times may reach 0 where they do not; there it says nothing.
        less_by_lines = np.where(eager > ours, 100 * (1 - ours / eager), np.nan)
        axis.plot(smooth, less_by_lines, color=colour, linewidth=1)
    axis.set(xlabel="cached tokens", ylabel="% less time than eager", ylim=(0, 100))
    axis.legend(fontsize=8)


def ratios(axis: Any, points: Sequence[Record]) -> None:
    for weights, some in by_weights(points).items():
        x = [point["context"] for point in some]
        colour, label = COLOURS[weights], f"fasttps {weights}".strip()
        axis.plot(x, [point["ratio"] for point in some], "o-", color=colour, label=label)
        axis.plot(x, [point["ratio_the_bytes_allow"] for point in some], "--", color=colour)
    axis.set(xlabel="cached tokens", ylabel="times eager's speed", ylim=(0, None))
    axis.legend(fontsize=8)


def times(axis: Any, points: Sequence[Record], lines: Sequence[Record]) -> None:
    drawn = set()
    for weights, some in by_weights(points).items():
        x = [point["context"] for point in some]
        for line in (line for line in lines if line["weights"] == weights):
            of = line["of"]
            if of == "eager" and of in drawn:  # the same for all weights
                continue
            drawn.add(of)
            colour = EAGER_COLOUR if of == "eager" else COLOURS[weights]
            name = of if of == "eager" else f"{of} {weights}".strip()
            label = f"{name}, R² {line['r_squared']:.4f}"
            axis.plot(x, [point[f"{of}_us"] / 1e3 for point in some], "o", color=colour)
            polynomial(axis, x, line["coefficients_us"], color=colour, label=label)
    axis.set(xlabel="cached tokens", ylabel="ms", xlim=(0, None), ylim=(0, None))
    axis.legend(fontsize=8)


def bars(axis: Any, mlps: Sequence[Record]) -> None:
    at = np.arange(len(mlps))
    for of, shift in (("eager", -0.2), ("fasttps", 0.2)):
        colours = [EAGER_COLOUR if of == "eager" else COLOURS[mlp["weights"]] for mlp in mlps]
        axis.bar(at + shift, [mlp[f"{of}_us"] / 1e3 for mlp in mlps], 0.4, color=colours)
    for x, mlp in zip(at, mlps):
        axis.text(
            x + 0.2, mlp["fasttps_us"] / 1e3, f"{mlp['ratio']:.2f} x", ha="center", fontsize=7
        )
    names = [f"{mlp['shape']} {mlp['weights']}" for mlp in mlps]
    axis.set_xticks(at, names, rotation=30, ha="right", fontsize=7)
    axis.set(ylabel="ms")
