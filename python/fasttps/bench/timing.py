"""Timing calls side by side.

All calls are timed in turn, round after round, so that a busy machine or a changing clock touches
them alike; the figure of a call is the median of its rounds. A slow call sits out most rounds.
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
MOST_S = 6.0  # all samples of one call last about as long, but for the fewest
FEWEST_SAMPLES = 3


class Sampled(Protocol):
    """A limit that is measured beside the calls, once a round."""

    def sample(self) -> None: ...


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call, over its rounds."""

    median_us: float
    fastest_us: float
    slowest_us: float
    rounds: int

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Timing:
        median_us = statistics.median(samples_us)
        return cls(median_us, min(samples_us), max(samples_us), len(samples_us))


def rotate(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One call that runs the given calls in turn, one each time, so that its data is not warm."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def rounds_of(seconds: float, rounds: int) -> list[int]:
    """In which of `rounds` a call that takes so long is timed: fewer, evenly spread, if it is slow.

    A call of 2 s or more has FEWEST_SAMPLES.
    """
    most = max(FEWEST_SAMPLES, int(MOST_S / max(seconds, 1e-9)))
    count = min(rounds, most)
    return [(2 * at + 1) * rounds // (2 * count) for at in range(count)]


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    warm_up_s: float = 0.05,
    limits: Sequence[Sampled] = (),
) -> dict[str, Timing]:
    """Time the calls in turn, after a warm-up, and sample `limits` among them, `rounds` times.

    A sample repeats its call until `MIN_SAMPLE_S` has passed, by a count fixed in the warm-up,
    which says too in how many rounds a slow call is timed.
    """
    counts, turns = {}, {}
    for name, call in calls.items():
        begin = time.perf_counter()
        call()
        seconds_each = time.perf_counter() - begin
        if seconds_each < MOST_S / FEWEST_SAMPLES:  # beyond, one call is warm-up enough
            begin, done = time.perf_counter(), 0
            while done == 0 or time.perf_counter() - begin < warm_up_s:
                call()
                done += 1
            seconds_each = (time.perf_counter() - begin) / done
        counts[name] = max(1, round(MIN_SAMPLE_S / max(seconds_each, 1e-9)))
        turns[name] = frozenset(rounds_of(seconds_each, rounds))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for at in range(rounds):
            for limit in limits:
                limit.sample()
            for name, call in calls.items():
                if at not in turns[name]:
                    continue
                begin = time.perf_counter()
                for _ in range(counts[name]):
                    call()
                samples[name].append((time.perf_counter() - begin) / counts[name] * 1e6)
    finally:
        if collecting:
            gc.enable()
    return {name: Timing.of(taken) for name, taken in samples.items()}
