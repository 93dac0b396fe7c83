"""What this machine can do at most: reading, multiplying, calling an op, waiting for each other.

Read bandwidth is the best loop's, by threads, at footprints from a first-level cache to memory
(`fasttps.bench.limits` says which loops are tried). Peaks are of one instruction on independent
accumulators. Empty OpenMP regions are timed with threads that spin and with threads that sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import harness
import torch
from rich.console import Console
from rich.table import Table

from fasttps.bench import Ruler, limits
from fasttps.bench.machine import last_level_cache_bytes

MIB = 1 << 20


def footprints(quick: bool) -> list[int]:
    """Bytes: in the caches, twice the last of them, and memory."""
    cache = last_level_cache_bytes()
    if quick:
        return [32 << 10, 2 * cache]
    return [32 << 10, 512 << 10, cache // 4, 2 * cache, max(1 << 30, 4 * cache)]


def thread_counts() -> list[int]:
    """1, 2, 4, ... and all of torch's threads."""
    all_threads = torch.get_num_threads()
    counts = [1]
    while counts[-1] * 2 < all_threads:
        counts.append(counts[-1] * 2)
    return sorted({*counts, all_threads})


def read_records(quick: bool, rounds: int) -> Iterator[dict[str, Any]]:
    ruler = Ruler(quick=quick)
    for threads in thread_counts():
        for footprint in footprints(quick):
            gauge = ruler.read(footprint, threads)
            gauge.sampled(rounds)
            yield {
                "limit": "read",
                "threads": threads,
                "footprint_bytes": gauge.bytes,
                "gb_per_s": round(gauge.rate, 2),
                "loop": gauge.best,
            }


def peak_records(rounds: int) -> Iterator[dict[str, Any]]:
    for threads in sorted({1, torch.get_num_threads()}):
        for instruction, rate in limits.peaks(threads, rounds).items():
            yield {
                "limit": "peak",
                "threads": threads,
                "instruction": instruction,
                "gop_per_s": round(rate, 1),
            }


def cost_records(rounds: int) -> Iterator[dict[str, Any]]:
    threads = torch.get_num_threads()
    for op, us in limits.dispatch_us(rounds).items():
        yield {"limit": "dispatch", "threads": threads, "of": op, "us": round(us, 3)}
    for policy, us in limits.region_us_by_policy(threads).items():
        what = f"empty OpenMP region, {policy}"
        yield {"limit": "region", "threads": threads, "of": what, "us": round(us, 3)}
    us = limits.barrier_us(threads, rounds)
    yield {"limit": "barrier", "threads": threads, "of": "spun barrier", "us": round(us, 4)}


def show(records: list[dict[str, Any]], console: Console) -> None:
    def table(title: str, kinds: tuple[str, ...], heads: tuple[str, ...], row: Any) -> None:
        shown = Table(*heads, title=title)
        for record in records:
            if record["limit"] in kinds:
                shown.add_row(*row(record))
        console.print(shown)

    def read_row(r: dict[str, Any]) -> tuple[str, ...]:
        footprint = f"{r['footprint_bytes'] / MIB:,.2f}"
        return str(r["threads"]), footprint, f"{r['gb_per_s']:,.1f}", r["loop"]

    def peak_row(r: dict[str, Any]) -> tuple[str, ...]:
        return str(r["threads"]), r["instruction"], f"{r['gop_per_s']:,.0f}"

    def cost_row(r: dict[str, Any]) -> tuple[str, ...]:
        return str(r["threads"]), r["of"], f"{r['us']:,.3f}"

    table("reading", ("read",), ("threads", "MiB", "GB/s", "best loop"), read_row)
    table("multiplying", ("peak",), ("threads", "instruction", "1e9 operations/s"), peak_row)
    table("cost", ("dispatch", "region", "barrier"), ("threads", "what", "µs"), cost_row)


def main() -> None:
    options = harness.parser(__doc__ or "")
    chosen = options.parse_args()
    if chosen.isa:
        options.error("--isa: the ruler tries every instruction set of this CPU")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    rounds = chosen.rounds or (3 if chosen.quick else 15)
    facts = harness.environment()
    facts = {key: facts[key] for key in facts if key not in ("isa", "threads")}
    records = [*read_records(chosen.quick, rounds), *peak_records(rounds), *cost_records(rounds)]
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = harness.FILE_WIDTH
    show(records, console)
    console.print(f"{facts['machine']} · commit {facts['commit']}")
    harness.write_json(chosen.json, [record | facts for record in records])


if __name__ == "__main__":
    main()
