"""The instruction sets of the CPU ops: which there are, which run here, which is used.

At first use the fastest that this CPU runs is taken; the environment variable FASTTPS_ISA, read
then, or `use` chooses another. One that cannot run here is a ValueError that lists those that can.
All ISAs compute the same within the tolerances of the tests; the choice is one of speed.

Where the CPU has a dot product of bf16, there are two ways to multiply bf16: by it ("dpbf16") or by
float32 FMA on widened values ("fma"). Which is faster differs between CPUs. In this order the
choice is that of FASTTPS_BF16_GEMM, of `fasttps tune`, of a table of measured CPUs, or a guess.
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


def is_proven(name: str) -> bool:
    """Whether `name` has run on a CPU. AMX has been tested on an emulation of its tiles alone."""
    return name != "avx512_amx"


@contextmanager
def forced(name: str) -> Iterator[None]:
    """`use(name)` inside a `with` block; the one before comes back after it."""
    before = active()
    use(name)
    try:
        yield
    finally:
        use(before)


def bf16_product() -> str:
    """How bf16 is multiplied: "dpbf16" or "fma". An ISA without the instruction has "fma" alone.

    Raises:
        ValueError: FASTTPS_BF16_GEMM names what cannot run here, or the file of `fasttps tune` is
            broken.
    """
    return _C.bf16_product()[0]


def bf16_product_origin() -> str:
    """In words, who chose `bf16_product()`."""
    return _C.bf16_product()[1]


def bf16_products() -> list[str]:
    """How this CPU can multiply bf16."""
    return _C.bf16_products()


def use_bf16_product(name: str) -> None:
    """Multiply bf16 by `name` in this process from now on.

    Raises:
        ValueError: `name` cannot run here; the message lists what can. Nothing has changed.
    """
    _C.use_bf16_product(name)


@contextmanager
def bf16_product_forced(name: str) -> Iterator[None]:
    """`use_bf16_product(name)` inside a `with` block; the one before comes back after it."""
    before = bf16_product()
    use_bf16_product(name)
    try:
        yield
    finally:
        use_bf16_product(before)
