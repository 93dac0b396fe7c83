"""Pictures of what the benchmarks measured; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def scaling(records: Sequence[Mapping[str, Any]], file: Path, title: str) -> None:
    """One panel a series, with its fit, and one for each figure of the paper."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = [record for record in records if record["benchmark"] == "scaling"]
    figures = [p for p in ("figure-6", "figure-7") if any(r["part"] == p for r in records)]
    count = len(series) + len(figures)
    columns = min(4, count)
    rows = -(-count // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False)
    for axis in axes.flat[count:]:
        axis.remove()
    for axis, record in zip(axes.flat, series):
        x = np.asarray(record["x"], dtype=float)
        smooth = np.linspace(0, x.max(), 200)
        fitted = np.polynomial.polynomial.polyval(smooth, record["coefficients_us"])
        axis.plot(smooth, fitted / 1e3, color="tab:gray", linewidth=1)
        axis.plot(x, np.asarray(record["us"]) / 1e3, "o", color="tab:green")
        slope = f", slope {record['slope']:g} {record['slope_unit']}" if "slope" in record else ""
        axis.set_title(f"{record['what']}\nR² {record['r_squared']:.4f}{slope}", fontsize=9)
        axis.set(xlabel=record["grows"], ylabel="ms", xlim=(0, None), ylim=(0, None))
    for axis, part in zip(axes.flat[len(series) :], figures):
        claims = [record for record in records if record["part"] == part]
        if part == "figure-6":
            axis.plot([r["context"] for r in claims], [100 * r["reduction"] for r in claims], "o-")
            axis.set(xlabel="cached tokens", ylabel="% less time than eager", ylim=(0, 100))
            axis.set_title(f"attention against eager, {claims[0]['shape']} (Figure 6)", fontsize=9)
        else:
            at = np.arange(len(claims))
            both = (("eager", -0.2, "tab:orange"), ("fasttps", 0.2, "tab:green"))
            for name, shift, colour in both:
                values = [record[f"{name}_us"] / 1e3 for record in claims]
                axis.bar(at + shift, values, 0.4, label=name, color=colour)
            axis.set_xticks(at, [record["shape"] for record in claims], rotation=20, fontsize=8)
            axis.set(ylabel="ms")
            axis.set_title("MLP of one token (Figure 7)", fontsize=9)
            axis.legend()
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)
    pyplot.close(figure)
