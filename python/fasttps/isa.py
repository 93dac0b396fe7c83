"""The instruction sets of the CPU ops: which there are, which run here, which is used.

At first use the fastest that this CPU runs is taken; the environment variable FASTTPS_ISA, read
then, or `use` chooses another. One that cannot run here is a ValueError that lists those that can.
All ISAs compute the same within the tolerances of the tests; the choice is one of speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fasttps import _C


def available() -> list[str]:
    """The instruction sets that this CPU runs, fastest first."""
    return _C.isas()


def active() -> str:
    """The instruction set that the ops use.

    Raises:
        ValueError: FASTTPS_ISA names one that cannot run here.
    """
    return _C.active_isa()


def use(name: str) -> None:
    """Make the ops of this process use `name`.

    Raises:
        ValueError: `name` cannot run here; the message lists those that can. Nothing has changed.
    """
    _C.use_isa(name)


def known() -> list[str]:
    """The instruction sets in this build, fastest first, whether or not they run here."""
    return _C.known_isas()


def missing(name: str) -> list[str]:
    """The CPU features that `name` needs and this CPU lacks; empty if it can run.

    Raises:
        ValueError: this build has no such instruction set.
    """
    return _C.missing_features(name)


@contextmanager
def forced(name: str) -> Iterator[None]:
    """`use(name)` inside a `with` block; the one before comes back after it."""
    before = active()
    use(name)
    try:
        yield
    finally:
        use(before)
