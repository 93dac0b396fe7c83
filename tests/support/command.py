"""Run the `fasttps` command as a process and look at what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE_PARENT = Path(__file__).resolve().parents[2] / "python"


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The one line of standard error that says what went wrong: the last, and no traceback."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("fasttps: ")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0]
        return lines[0]


def run_process(*arguments: object, stdin: bytes | None = None, **environment: str) -> Ran:
    """Run the command as a person's shell would, without a terminal."""
    ran = subprocess.run(
        [sys.executable, "-m", "fasttps", *map(str, arguments)],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        env={**process_environment(), **environment},
        timeout=120,
    )
    return Ran(ran.returncode, ran.stdout.decode(), ran.stderr.decode())


def process_environment() -> dict[str, str]:
    paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
