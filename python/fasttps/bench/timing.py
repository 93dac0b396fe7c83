"""Timing calls side by side.

All calls are timed in turn, round after round, so that a busy machine or a changing clock touches
them alike; the figure of a call is the median of its rounds.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

MIN_SAMPLE_S = 2e-3  # a sample repeats a short call until it lasts this long


class Sampled(Protocol):
    """A limit that is measured beside the calls, once a round."""

    def sample(self) -> None: ...


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


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    warm_up_s: float = 0.05,
    limits: Sequence[Sampled] = (),
) -> dict[str, Timing]:
    """Time the calls in turn, `rounds` times each, after a warm-up; sample `limits` among them.

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
            for limit in limits:
                limit.sample()
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
