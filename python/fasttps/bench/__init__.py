"""Measuring: interleaved timing, and a ruler for what this machine can do at most.

- `fasttps.bench.timing`: the median of calls that are timed in turn.
- `fasttps.bench.limits`: read bandwidth, instruction peaks, dispatch and barrier cost.
- `fasttps.bench.case`: a measured case, its record and its table.
- `fasttps.bench.machine`: which machine it was.

`fasttps bench` and the project's own benchmarks rest on it.
"""

from __future__ import annotations

from fasttps.bench.limits import BrokenRulerError, Gauge, Ruler, share_of_limit
from fasttps.bench.timing import Timing, measure, rotate

__all__ = [
    "BrokenRulerError",
    "Gauge",
    "Ruler",
    "Timing",
    "measure",
    "rotate",
    "share_of_limit",
]
