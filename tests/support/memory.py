"""What a script takes in memory, from where it says `begin()` on, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.support.command import process_environment

_BEFORE = """
import sys
from pathlib import Path

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def begin():  # the peak begins anew
    global before
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
"""
_AFTER = """
print(memory("VmHWM") - before, memory("VmRSS") - before, counted)
"""


def measured(script: str, *arguments: Any) -> tuple[int, int, int]:
    """Bytes: the peak, what is held at the end, and `counted`, which the script sets."""
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _BEFORE + script + _AFTER, *arguments],
            env=process_environment(),
            capture_output=True,
            text=True,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        if "clear_refs" in error.stderr:
            pytest.skip("this system does not let a process begin its peak anew")
        raise
    peak, after, counted = map(int, ran.stdout.split())
    return peak, after, counted
