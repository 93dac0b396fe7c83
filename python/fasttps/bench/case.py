"""One measured case of one op: calls side by side, what bounds them, a record and a table.

A case holds our call first and the calls a person would use instead. All are timed in turn, round
after round, and the ruler among them: read bandwidth at the case's footprint, and the multiplier's
peak, on the same threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fasttps.bench.limits import BrokenRulerError, Gauge, Ruler, share_of_limit
from fasttps.bench.timing import Timing, measure

OURS = "fasttps"
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
}


@dataclass(frozen=True)
class Case:
    """One shape of one op.

    Attributes:
        shape: what a reader recognises, such as "llama-3.2-1b ctx 4096".
        dtype: of the activations and caches.
        calls: name to call; `fasttps` is ours, the others are what a person would use instead.
        read_bytes, written_bytes: what one call must at least move between memory and cores.
        footprint_bytes: what all calls in turn read together, where that is more than read_bytes.
        flops: multiplications and additions of one call, masked work not counted.
        product: the type whose fastest exact product bounds the flops, where that is not `dtype`.
        notes: further facts for the record.
    """

    shape: str
    dtype: torch.dtype
    calls: Mapping[str, Callable[[], object]]
    read_bytes: int = 0
    written_bytes: int = 0
    footprint_bytes: int = 0
    flops: int = 0
    product: torch.dtype | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def gauges_of(case: Case, ruler: Ruler) -> dict[str, Gauge]:
    """What bounds the case: "read" where it reads, "product" where it multiplies."""
    gauges: dict[str, Gauge] = {}
    if case.read_bytes:
        gauges["read"] = ruler.read(max(case.footprint_bytes, case.read_bytes))
    product = ruler.product(case.product or case.dtype) if case.flops else None
    if product is not None:
        gauges["product"] = product
    return gauges


def record_of(
    op: str,
    case: Case,
    timings: Mapping[str, Timing],
    gauges: Mapping[str, Gauge],
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """One JSON line: our median, its rates, and the median of every alternative beside it.

    Raises:
        BrokenRulerError: a rate is above what the ruler found; not `strict`: the record says so.
    """

    def share_of(rate: float, gauge: Gauge, unit: str) -> float:
        try:
            return round(share_of_limit(f"{op}, {case.shape}", rate, gauge.rate, unit), 4)
        except BrokenRulerError as error:
            if strict:
                raise
            record["broken_ruler"] = str(error)
            return round(rate / gauge.rate, 4)

    ours = timings[OURS]
    record: dict[str, Any] = {
        "op": op,
        "shape": case.shape,
        "dtype": DTYPE_NAMES[case.dtype],
        "median_us": round(ours.median_us, 3),
        "fastest_us": round(ours.fastest_us, 3),
        "slowest_us": round(ours.slowest_us, 3),
        "rounds": ours.rounds,
    }
    if case.read_bytes or case.written_bytes:
        record["read_bytes"] = case.read_bytes
        record["written_bytes"] = case.written_bytes
        moved_bytes = case.read_bytes + case.written_bytes
        record["gb_per_s"] = round(moved_bytes / ours.median_us / 1e3, 3)
    if "read" in gauges:
        read = gauges["read"]
        record |= {"read_gb_per_s": round(read.rate, 2), "read_loop": read.best}
        # Written bytes travel beside those that are read, so they count for no share.
        rate = case.read_bytes / ours.median_us / 1e3
        record["share_of_read_bandwidth"] = share_of(rate, read, "GB/s")
    if case.flops:
        record["flops"] = case.flops
        record["gflop_per_s"] = round(case.flops / ours.median_us / 1e3, 3)
    if "product" in gauges:
        peak = gauges["product"]
        record |= {"peak_gflop_per_s": round(peak.rate, 1), "peak_instruction": peak.best}
        record["share_of_peak"] = share_of(record["gflop_per_s"], peak, "GFLOP/s")
    for name, timing in timings.items():
        if name != OURS:
            record[f"{name}_us"] = round(timing.median_us, 3)
            record[f"{name}_over_{OURS}"] = round(timing.median_us / ours.median_us, 3)
            if timing.rounds != ours.rounds:
                record[f"{name}_rounds"] = timing.rounds
    record.update(case.notes)
    return record


def judged(op: str, case: Case, ruler: Ruler, rounds: int) -> dict[str, Any]:
    """Time the case among the limits that bound it.

    A record of a case that is faster than the limits three times in a row says so, under
    `broken_ruler`.
    """
    for attempt in (1, 2):  # other programs may have had the cores while loops were chosen
        with suppress(BrokenRulerError):
            return _judged(op, case, ruler, attempt * rounds, strict=True)
    return _judged(op, case, ruler, 3 * rounds, strict=False)


def _judged(op: str, case: Case, ruler: Ruler, rounds: int, strict: bool) -> dict[str, Any]:
    gauges = gauges_of(case, ruler)
    timings = measure(case.calls, rounds=rounds, limits=tuple(gauges.values()))
    return record_of(op, case, timings, gauges, strict=strict)


def show(title: str, records: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """A table of the records: ours in µs, its rates, and each alternative as a multiple of ours."""
    console = console or Console()
    table = Table(title=title)
    others = list(
        dict.fromkeys(
            key.removesuffix(f"_over_{OURS}")
            for record in records
            for key in record
            if key.endswith(f"_over_{OURS}")
        )
    )
    rates = {
        "gb_per_s": "GB/s",
        "share_of_read_bandwidth": "of read",
        "gflop_per_s": "GFLOP/s",
        "share_of_peak": "of peak",
    }
    rates = {key: head for key, head in rates.items() if any(key in r for r in records)}
    table.add_column("shape", no_wrap=True)
    table.add_column("dtype")
    for head in [f"{OURS} µs", *rates.values(), *(f"{name} µs (x)" for name in others)]:
        table.add_column(head, justify="right")
    for record in records:
        row = [record["shape"], record["dtype"], f"{record['median_us']:,.1f}"]
        for key in rates:
            value = record.get(key)
            form = "{:.0%}" if key.startswith("share") else "{:,.1f}"
            row.append("" if value is None else form.format(value))
        for name in others:
            value = record.get(f"{name}_us")
            ratio = record.get(f"{name}_over_{OURS}")
            row.append("" if value is None else f"{value:,.1f} ({ratio:.2f})")
        table.add_row(*row)
    console.print(table)
