"""What this machine can do at most: a ruler to hold measured work against.

Read bandwidth is the best of many loops (1 to 8 streams a thread, software prefetch, 512- and
256-bit loads, huge pages or not) on as many threads and as many bytes as the work has, since a
footprint that fits a cache is read faster than memory. A `Gauge` is sampled in turn with the work.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fasttps import _C
from fasttps.bench.machine import available_memory_bytes, has_huge_pages, last_level_cache_bytes
from fasttps.bench.timing import measure

MOST_OF_A_LIMIT = 1.02  # beyond it the limit was measured wrongly
FINALISTS = 3  # loops that are sampled beside the work
SMALLEST_FOOTPRINT = 4 << 10  # bytes a thread: fewer measure the loop's own start
BYTES_A_SAMPLE = 16 << 20  # a sample reads a small footprint this often
PEAK_SAMPLE_S = 2e-3

# What multiplies two numbers of a type, exactly: their products summed in float32 (int32 for int8).
PRODUCTS = {
    torch.float32: ("vfmadd231ps zmm", "vfmadd231ps ymm"),
    torch.float16: ("vfmadd231ps zmm", "vfmadd231ps ymm"),
    torch.bfloat16: ("vdpbf16ps zmm", "vfmadd231ps zmm", "vfmadd231ps ymm"),
    torch.int8: ("vpdpbusd zmm", "vfmadd231ps zmm", "vfmadd231ps ymm"),
}


class BrokenRulerError(RuntimeError):
    """Work was faster than the limit it was held against, so the limit is wrong."""


def share_of_limit(what: str, rate: float, limit: float, unit: str = "GB/s") -> float:
    """rate / limit.

    Raises:
        BrokenRulerError: it is above 1.02.
    """
    share = rate / limit
    if share > MOST_OF_A_LIMIT:
        raise BrokenRulerError(
            f"broken ruler: {what} runs at {rate:.4g} {unit}, {share:.3f} of the {limit:.4g} "
            f"{unit} that the ruler found in the same run; wanted at most {MOST_OF_A_LIMIT}"
        )
    return share


@dataclass(frozen=True)
class Loop:
    """One way to read memory."""

    isa: str
    streams: int
    hint: str = "none"  # or all_levels, non_temporal
    prefetch_bytes: int = 0

    def __str__(self) -> str:
        ahead = f" {self.hint} {self.prefetch_bytes}" if self.prefetch_bytes else ""
        return f"{self.isa} x{self.streams}{ahead}"


class Gauge:
    """The best of a few rates, in units of 1e9 a second, as the medians of samples have them."""

    def __init__(self, candidates: Iterable[str]) -> None:
        self._samples: dict[str, list[float]] = {name: [] for name in candidates}

    def take(self, name: str) -> float:
        """One measured rate of a candidate."""
        raise NotImplementedError

    def sample(self) -> None:
        """Measure each candidate once."""
        for name, taken in self._samples.items():
            taken.append(self.take(name))

    def sampled(self, rounds: int) -> float:
        """The rate after `rounds` more samples."""
        for _ in range(rounds):
            self.sample()
        return self.rate

    def latest(self) -> dict[str, float]:
        """What the last `sample` found of each candidate."""
        return {name: taken[-1] for name, taken in self._samples.items() if taken}

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(taken) for name, taken in self._samples.items() if taken}

    def highest(self) -> dict[str, float]:
        return {name: max(taken) for name, taken in self._samples.items() if taken}

    @property
    def best(self) -> str:
        """The candidate with the highest median."""
        medians = self.medians()
        return max(medians, key=medians.__getitem__)

    @property
    def rate(self) -> float:
        return self.medians()[self.best]

    def keep(self, count: int) -> None:
        """Forget all candidates but the best `count`, and their samples."""
        medians = self.medians()
        best = sorted(medians, key=medians.__getitem__, reverse=True)[:count]
        self._samples = {name: [] for name in best}


class ReadGauge(Gauge):
    """GB/s of reading `footprint_bytes` again and again on `threads` threads."""

    def __init__(self, footprint_bytes: int, threads: int, quick: bool) -> None:
        super().__init__(())
        most = max(1 << 30, 4 * last_level_cache_bytes())
        most = max(min(most, available_memory_bytes() // 4), 1 << 20)
        bytes_ = min(max(footprint_bytes, SMALLEST_FOOTPRINT * threads), most)
        self.bytes = -(-bytes_ // 64) * 64
        self.threads = threads
        self._sweeps = -(-BYTES_A_SAMPLE // self.bytes)
        self._loops: dict[str, tuple[Loop, bool]] = {}
        self._buffers: dict[bool, _C.ReadBuffer] = {}
        pages = [True, False] if has_huge_pages() else [False]
        self._offer(loops(quick), pages[0])
        self.sampled(1 if quick else 3)
        if not quick and len(pages) == 2:
            self.keep(2 * FINALISTS)
            self._offer([self._loops[name][0] for name in self._samples], pages[1])
            self.sampled(3)
        self.keep(2 if quick else FINALISTS)
        used = {self._loops[name][1] for name in self._samples}
        self._buffers = {huge: buffer for huge, buffer in self._buffers.items() if huge in used}

    def _offer(self, loops: Iterable[Loop], huge_pages: bool) -> None:
        self._buffers[huge_pages] = _C.ReadBuffer(self.bytes, self.threads, huge_pages)
        for loop in loops:
            name = f"{loop}{' huge pages' if huge_pages else ''}"
            self._loops[name] = loop, huge_pages
            self._samples[name] = []

    def take(self, name: str) -> float:
        loop, huge_pages = self._loops[name]
        buffer = self._buffers[huge_pages]
        begin = time.perf_counter()
        buffer.read(loop.isa, loop.streams, loop.hint, loop.prefetch_bytes, self._sweeps)
        return self._sweeps * self.bytes / (time.perf_counter() - begin) / 1e9


class PeakGauge(Gauge):
    """1e9 operations a second of the fastest of some instructions on `threads` threads."""

    def __init__(self, instructions: Iterable[str], threads: int) -> None:
        here = {instruction for _, instruction in _C.peak_instructions()}
        super().__init__(name for name in instructions if name in here)
        self.threads = threads

    def take(self, name: str) -> float:
        return _C.peak_operations_per_s(name, self.threads, PEAK_SAMPLE_S) / 1e9


def loops(quick: bool) -> list[Loop]:
    """The ways to read that are tried; the two widest vectors of this CPU, or scalar words."""
    isas = _C.read_isas()
    if quick:
        plain = [Loop(isas[0], streams) for streams in (1, 2, 4)]
        return [*plain, *(Loop(isas[0], s, "all_levels", 1024) for s in (1, 2))]
    ahead = [("none", 0), *(("all_levels", b) for b in (512, 1024, 2048, 4096))]
    ahead += [("non_temporal", b) for b in (1024, 2048)]
    return [Loop(isa, s, *hint) for isa in isas[:2] for s in (1, 2, 4, 8) for hint in ahead]


class Ruler:
    """Limits of this machine, at the footprint and the thread count of the work judged.

    Args:
        quick: try few loops.
    """

    def __init__(self, *, quick: bool = False) -> None:
        self.quick = quick
        self._read: ReadGauge | None = None

    def read(self, footprint_bytes: int, threads: int | None = None) -> ReadGauge:
        """A gauge of read bandwidth; it holds memory of the footprint's size.

        A footprint beyond 1 GiB, and four times the last-level cache, is measured at that.
        """
        self._read = None  # its memory is free before the next is taken
        self._read = ReadGauge(footprint_bytes, threads or torch.get_num_threads(), self.quick)
        return self._read

    def read_gb_per_s(self, footprint_bytes: int, threads: int | None = None) -> float:
        """Read bandwidth measured now, alone."""
        return self.read(footprint_bytes, threads).sampled(3 if self.quick else 7)

    def product(self, dtype: torch.dtype, threads: int | None = None) -> PeakGauge | None:
        """A gauge of the fastest exact multiply-add of `dtype`; None where the CPU's is unknown."""
        gauge = PeakGauge(PRODUCTS[dtype], threads or torch.get_num_threads())
        return gauge if gauge._samples else None


def peaks(threads: int, rounds: int = 15) -> dict[str, float]:
    """1e9 operations a second of each instruction that this CPU has, at its best of `rounds`."""
    names = [instruction for _, instruction in _C.peak_instructions()]
    gauge = PeakGauge(names, threads)
    for _ in range(rounds):
        gauge.sample()
    return gauge.highest()


def barrier_us(threads: int, rounds: int = 7) -> float:
    """One spun barrier between the threads of a region; meant for threads with a core each."""
    return 1e6 * min(_C.barrier_seconds(threads, 2000) for _ in range(rounds))


def region_us(threads: int, rounds: int = 7) -> float:
    """One empty OpenMP region of this process, as its OMP_WAIT_POLICY has it."""
    return 1e6 * min(_C.region_seconds(threads, 500) for _ in range(rounds))


def region_us_by_policy(threads: int) -> dict[str, float]:
    """`region_us` in processes of their own: threads read OMP_WAIT_POLICY when torch is loaded."""
    code = f"from fasttps.bench import limits; print(limits.region_us({threads}))"
    found = {}
    for policy in ("active", "passive"):
        environment = {**os.environ, "OMP_WAIT_POLICY": policy}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found[policy] = float(done.stdout)
    return found


def dispatch_us(rounds: int = 7) -> dict[str, float]:
    """Ops that do nothing, called from Python: torch's own, and ours with its check."""
    x = torch.zeros(1)
    k_cache, v_cache = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    rows = torch.zeros(1, 0, 1, 1)
    seq_lens = torch.tensor(0)
    calls = {
        "aten::is_same_size": lambda: torch.ops.aten.is_same_size(x, x),
        "fasttps::kv_cache_update_": lambda: torch.ops.fasttps.kv_cache_update_(
            k_cache, v_cache, rows, rows, seq_lens
        ),
    }
    with torch.inference_mode():
        timings = measure(calls, rounds=rounds)
    return {name: timing.fastest_us for name, timing in timings.items()}
