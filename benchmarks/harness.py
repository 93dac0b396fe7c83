"""What the benchmarks share: side-by-side timing, counted bytes and flops, one record a case.

A benchmark names cases; each case holds our call first and the calls a person would use instead.
All calls of a case are timed in turn, round after round, and the ruler (`fasttps.bench.limits`)
among them: read bandwidth at the case's footprint, and the multiplier's peak, on the same threads.
Every record carries the machine, the commit, the ISA and the threads: a line of JSON can be read
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fasttps
from fasttps.bench import BrokenRulerError, Gauge, Ruler, Timing, measure, rotate, share_of_limit
from fasttps.bench.machine import last_level_cache_bytes, machine

__all__ = [
    "OURS",
    "BrokenRulerError",
    "Case",
    "Ruler",
    "Timing",
    "commit",
    "copies_beyond_cache",
    "environment",
    "machine",
    "main",
    "measure",
    "parser",
    "rotate",
    "write_json",
]

OURS = "fasttps"
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
}
BUSY_LOAD = 0.5  # processes on average; from there on others take time from the runs
FILE_WIDTH = 140  # columns of a table that goes into a file


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


def copies_beyond_cache(bytes_per_copy: int, limit_bytes: int = 1 << 30) -> int:
    """How many copies of a working set it takes to exceed the last-level cache twice over.

    At least one; as many as `limit_bytes` allows, so the L3 of a large server may still win.
    """
    wanted = -(-2 * last_level_cache_bytes() // max(bytes_per_copy, 1)) + 1
    return max(1, min(wanted, limit_bytes // max(bytes_per_copy, 1)))


def commit() -> str:
    """The commit of the checkout, with a `+` where tracked files differ; "unknown" outside one."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment() -> dict[str, Any]:
    """The facts that every record carries."""
    return {
        "isa": fasttps.isa.active(),
        "threads": torch.get_num_threads(),
        "machine": machine(),
        "commit": commit(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute, before this run
    }


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
    op: str, case: Case, timings: Mapping[str, Timing], gauges: Mapping[str, Gauge]
) -> dict[str, Any]:
    """One JSON line: our median, its rates, and the median of every alternative beside it.

    Raises:
        BrokenRulerError: a rate is above what the ruler found.
    """
    ours = timings[OURS]
    record: dict[str, Any] = {
        "op": op,
        "shape": case.shape,
        "dtype": DTYPE_NAMES[case.dtype],
        "median_us": round(ours.median_us, 3),
        "fastest_us": round(ours.fastest_us, 3),
        "slowest_us": round(ours.slowest_us, 3),
    }
    what = f"{op}, {case.shape}"
    if case.read_bytes or case.written_bytes:
        record["read_bytes"] = case.read_bytes
        record["written_bytes"] = case.written_bytes
        moved_bytes = case.read_bytes + case.written_bytes
        record["gb_per_s"] = round(moved_bytes / ours.median_us / 1e3, 3)
    if "read" in gauges:
        read = gauges["read"]
        record |= {"read_gb_per_s": round(read.rate, 2), "read_loop": read.best}
        # Written bytes travel beside those that are read, so they count for no share.
        share = share_of_limit(what, case.read_bytes / ours.median_us / 1e3, read.rate)
        record["share_of_read_bandwidth"] = round(share, 4)
    if case.flops:
        record["flops"] = case.flops
        record["gflop_per_s"] = round(case.flops / ours.median_us / 1e3, 3)
    if "product" in gauges:
        peak = gauges["product"]
        record |= {"peak_gflop_per_s": round(peak.rate, 1), "peak_instruction": peak.best}
        share = share_of_limit(what, record["gflop_per_s"], peak.rate, "GFLOP/s")
        record["share_of_peak"] = round(share, 4)
    for name, timing in timings.items():
        if name != OURS:
            record[f"{name}_us"] = round(timing.median_us, 3)
            record[f"{name}_over_{OURS}"] = round(timing.median_us / ours.median_us, 3)
    record.update(case.notes)
    return record


def judged(op: str, case: Case, ruler: Ruler, rounds: int) -> dict[str, Any]:
    """Time the case among the limits that bound it.

    Raises:
        BrokenRulerError: it is faster than the limits, twice in a row.
    """
    gauges = gauges_of(case, ruler)
    timings = measure(case.calls, rounds=rounds, limits=tuple(gauges.values()))
    try:
        return record_of(op, case, timings, gauges)
    except BrokenRulerError:  # other programs may have had the cores while the loops were chosen
        gauges = gauges_of(case, ruler)
        timings = measure(case.calls, rounds=3 * rounds, limits=tuple(gauges.values()))
        return record_of(op, case, timings, gauges)


def broken_ruler(wrong: Sequence[str], quick: bool, console: Console) -> None:
    """Say what was faster than the memory can be read, when all else is written.

    Raises:
        SystemExit: not `quick`, whose few samples of a busy machine prove nothing.
    """
    text = "\n".join(["broken ruler, faster than the memory can be read:", *wrong])
    if not quick:
        raise SystemExit(text)
    console.print(text, markup=False)


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


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="a few small cases, few rounds")
    options.add_argument("--rounds", type=int, help="samples of each call (15; 5 with --quick)")
    options.add_argument("--isa", help="force an instruction set, such as avx2")
    options.add_argument("--threads", type=int, help="torch threads (as torch chose)")
    options.add_argument("--json", type=Path, help="append one line of JSON a case to this file")
    return options


def write_json(path: Path | None, records: Iterable[Mapping[str, Any]]) -> None:
    """Append the records to `path`, one a line; nothing where there is no path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        for record in records:
            lines.write(json.dumps(record) + "\n")


@torch.inference_mode()
def main(
    op: str,
    cases: Callable[[bool], Iterator[Case]],
    arguments: Sequence[str] | None = None,
    *,
    description: str = "",
) -> list[dict[str, Any]]:
    """Run a benchmark file: time each case, show the table, append the JSON lines.

    `cases(quick)` yields cases one at a time, so that the tensors of one are free before the next.
    """
    options = parser(description or f"Benchmark of {op}.").parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    rounds = options.rounds or (5 if options.quick else 15)
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    records = []
    with fasttps.isa.forced(options.isa) if options.isa else nullcontext():
        facts = environment()
        if facts["load_average"] > BUSY_LOAD:
            console.print(
                f"load average {facts['load_average']}: the figures are of a busy machine"
            )
        ruler = Ruler(quick=options.quick)
        for case in cases(options.quick):
            records.append(judged(op, case, ruler, rounds) | facts)
            del case
    show(op, records, console)
    console.print(
        f"{facts['machine']} · isa {facts['isa']} · {facts['threads']} threads · "
        f"commit {facts['commit']}"
    )
    write_json(options.json, records)
    return records
