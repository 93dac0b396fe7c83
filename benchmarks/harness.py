"""What the benchmarks share: side-by-side timing, counted bytes and flops, one record a case.

A benchmark names cases; each case holds our call first and the calls a person would use instead.
All calls of a case are timed in turn, round after round, so that a busy machine or a changing
clock touches them alike; the figure of a call is the median of its rounds.
Every record carries the machine, the commit, the ISA and the threads: a line of JSON can be read
alone. Rates are ratios against `read_gb_per_s`, measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fasttps

OURS = "fasttps"
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
}
BUSY_LOAD = 0.5  # processes on average; from there on others take time from the runs
FILE_WIDTH = 140  # columns of a table that goes into a file
MIN_SAMPLE_S = 2e-3  # a sample repeats a short call until it lasts this long


@dataclass(frozen=True)
class Case:
    """One shape of one op.

    Attributes:
        shape: what a reader recognises, such as "llama-3.2-1b ctx 4096".
        dtype: of the activations and caches.
        calls: name to call; `fasttps` is ours, the others are what a person would use instead.
        read_bytes, written_bytes: what one call must at least move between memory and cores.
        flops: multiplications and additions of one call, masked work not counted.
        notes: further facts for the record.
    """

    shape: str
    dtype: torch.dtype
    calls: Mapping[str, Callable[[], object]]
    read_bytes: int = 0
    written_bytes: int = 0
    flops: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call, over the rounds."""

    median_us: float
    fastest_us: float
    slowest_us: float


def rotate(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One call that runs the given calls in turn, one each time, so that its data is not warm."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def copies_beyond_cache(bytes_per_copy: int, limit_bytes: int = 1 << 30) -> int:
    """How many copies of a working set it takes to exceed the last-level cache twice over.

    At least one; as many as `limit_bytes` allows, so the L3 of a large server may still win.
    """
    wanted = -(-2 * last_level_cache_bytes() // max(bytes_per_copy, 1)) + 1
    return max(1, min(wanted, limit_bytes // max(bytes_per_copy, 1)))


def last_level_cache_bytes() -> int:
    """The largest cache of the first core as Linux states it; 32 MiB where it states none."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]])
    return max(sizes)


def measure(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = 15, warm_up_s: float = 0.05
) -> dict[str, Timing]:
    """Time the calls in turn, `rounds` times each, after a warm-up.

    A sample repeats its call until `MIN_SAMPLE_S` has passed, by a count fixed in the warm-up.
    """
    counts = {}
    for name, call in calls.items():
        call()
        begin, done = time.perf_counter(), 0
        while done == 0 or time.perf_counter() - begin < warm_up_s:
            call()
            done += 1
        seconds_each = (time.perf_counter() - begin) / done
        counts[name] = max(1, round(MIN_SAMPLE_S / max(seconds_each, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                begin = time.perf_counter()
                for _ in range(counts[name]):
                    call()
                samples[name].append((time.perf_counter() - begin) / counts[name] * 1e6)
    finally:
        if collecting:
            gc.enable()
    return {
        name: Timing(statistics.median(taken), min(taken), max(taken))
        for name, taken in samples.items()
    }


def read_bandwidth_gb_per_s(buffer_bytes: int = 1 << 29, rounds: int = 5) -> float:
    """What torch's threads read from memory together: the sum of a buffer no cache holds."""
    buffer = torch.ones(buffer_bytes // 4)
    timing = measure({"sum": buffer.sum}, rounds=rounds)["sum"]
    return buffer_bytes / timing.median_us / 1e3


def machine() -> str:
    """The CPU's name, family, model and count, as the kernel states them."""
    facts: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts:
        name += f" family {facts['cpu family']} model {facts.get('model', '?')}"
    return f"{name}, {os.cpu_count()} cpus"


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


def record_of(
    op: str, case: Case, timings: Mapping[str, Timing], read_gb_per_s: float | None
) -> dict[str, Any]:
    """One JSON line: our median, its rates, and the median of every alternative beside it."""
    ours = timings[OURS]
    record: dict[str, Any] = {
        "op": op,
        "shape": case.shape,
        "dtype": DTYPE_NAMES[case.dtype],
        "median_us": round(ours.median_us, 3),
        "fastest_us": round(ours.fastest_us, 3),
        "slowest_us": round(ours.slowest_us, 3),
    }
    moved_bytes = case.read_bytes + case.written_bytes
    if moved_bytes:
        record["read_bytes"] = case.read_bytes
        record["written_bytes"] = case.written_bytes
        record["gb_per_s"] = round(moved_bytes / ours.median_us / 1e3, 3)
        if read_gb_per_s:
            share = record["gb_per_s"] / read_gb_per_s
            record["share_of_read_bandwidth"] = round(share, 4)
    if case.flops:
        record["flops"] = case.flops
        record["gflop_per_s"] = round(case.flops / ours.median_us / 1e3, 3)
    for name, timing in timings.items():
        if name != OURS:
            record[f"{name}_us"] = round(timing.median_us, 3)
            record[f"{name}_over_{OURS}"] = round(timing.median_us / ours.median_us, 3)
    record.update(case.notes)
    return record


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
    rates = {"gb_per_s": "GB/s", "share_of_read_bandwidth": "of read", "gflop_per_s": "GFLOP/s"}
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
        read_gb_per_s = read_bandwidth_gb_per_s((1 << 27) if options.quick else (1 << 29))
        facts["read_gb_per_s"] = round(read_gb_per_s, 2)
        for case in cases(options.quick):
            timings = measure(case.calls, rounds=rounds)
            records.append(record_of(op, case, timings, read_gb_per_s) | facts)
            del case
    show(op, records, console)
    console.print(
        f"{facts['machine']} · isa {facts['isa']} · {facts['threads']} threads · "
        f"read {read_gb_per_s:.1f} GB/s · commit {facts['commit']}"
    )
    write_json(options.json, records)
    return records
