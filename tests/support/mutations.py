"""Damage to a file, seeded: what a fuzzer of a reader feeds it."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Callable

# Counts, lengths and offsets that wrap, are absurd, or are off by one.
NUMBERS = (
    0, 1, 2, 7, 31, 33, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**60,
    2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1,
)  # fmt: skip
# That a refused file may cost. What is absurd costs gigabytes; the heap's own growth comes to a
# megabyte or two now and then, whatever is read.
GROWTH_KIB = 8192


def damaged(data: bytes, seed: int, focus: int) -> bytes:
    """The bytes with one to four changes, most of them in the first `focus` bytes."""
    rng = random.Random(seed)
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = len(made) if rng.random() < 0.1 else min(focus, len(made))
        if end < 9:
            break
        at = rng.randrange(end - 8)
        kind = rng.randrange(6)
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            made[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        elif kind == 2:
            made[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 3:
            del made[at : at + rng.randint(1, 64)]
        elif kind == 4:
            made[at:at] = made[at : at + rng.randint(1, 64)]
        else:
            del made[rng.randrange(len(made)) :]
    return bytes(made)


def peak_kib() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def survives(read: Callable[[], object], seed: int, *errors: type[Exception]) -> bool:
    """Whether `read` returned; an error must be one of these, on one line, and cost nothing."""
    before = peak_kib()
    try:
        read()
        return True
    except errors as error:
        text = str(error)
        assert text and "\n" not in text, f"seed {seed}: {text!r}"
        assert peak_kib() - before < GROWTH_KIB, f"seed {seed}: memory for {text!r}"
        return False
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
