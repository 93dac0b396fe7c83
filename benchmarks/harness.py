"""What the benchmarks share: the options, the run over all cases, records with their machine.

A benchmark names cases (`fasttps.bench.case`), and `main` runs them. Every record carries the
machine, the commit, the ISA and the threads: a line of JSON can be read alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import fasttps
from fasttps.bench import BrokenRulerError, Ruler, Timing, measure, rotate
from fasttps.bench.case import DTYPE_NAMES, OURS, Case, judged, record_of, show
from fasttps.bench.machine import last_level_cache_bytes, machine

__all__ = [
    "DTYPE_NAMES",
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
    "record_of",
    "rotate",
    "show",
    "write_json",
]

BUSY_LOAD = 0.5  # processes on average; from there on others take time from the runs
FILE_WIDTH = 140  # columns of a table that goes into a file


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
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),  # passive slows short regions
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute, before this run
    }


def broken_ruler(wrong: Sequence[str], quick: bool, console: Console) -> None:
    """Say what was faster than the limits that were measured, when all else is written.

    Raises:
        SystemExit: not `quick`, whose few samples of a busy machine prove nothing.
    """
    if not wrong:
        return
    text = "\n".join(["broken ruler, faster than the machine was found to be:", *wrong])
    if not quick:
        raise SystemExit(text)
    console.print(text, markup=False)


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="a few small cases, few rounds")
    rounds = "samples of each call (15; 5 with --quick); fewer of one that takes 0.4 s or more"
    options.add_argument("--rounds", type=int, help=rounds)
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
    """Run a benchmark file: time each case, append its line of JSON, show the table of all.

    `cases(quick)` yields cases one at a time, so that the tensors of one are free before the next.
    """
    takes = parser(description or f"Benchmark of {op}.")
    takes.add_argument("--only", default="", metavar="TEXT", help="cases whose shape has it")
    options = takes.parse_args(arguments)
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
            if options.only in case.shape:
                records.append(judged(op, case, ruler, rounds) | facts)
                write_json(options.json, records[-1:])
            del case
    show(op, records, console)
    console.print(
        f"{facts['machine']} · isa {facts['isa']} · {facts['threads']} threads · "
        f"commit {facts['commit']}"
    )
    wrong = [record["broken_ruler"] for record in records if "broken_ruler" in record]
    broken_ruler(wrong, options.quick, console)
    return records
