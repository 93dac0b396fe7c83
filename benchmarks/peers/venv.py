"""One virtual environment a peer, under the cache folder, made once for what it is made of."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.24.0"


class Venv:
    """A folder with a Python of its own; `make` fills it, a stamp tells that it is whole.

    Attributes:
        folder: CACHE/venvs/NAME.
        python: its interpreter.
        log: CACHE/venvs/NAME.log, everything that the installation printed.
    """

    def __init__(self, cache: Path, name: str, install: Callable[[Venv], None]) -> None:
        self.folder = cache / "venvs" / name
        self.python = self.folder / "bin" / "python"
        self.log = self.folder.with_name(f"{name}.log")
        self._stamp = self.folder / "installed"
        self._install = install
        self._out: IO[str] | None = None

    def is_made(self) -> bool:
        return self._stamp.exists() and self._stamp.read_text() == self._recipe()

    def make(self) -> None:
        """Install, unless the same recipe was installed.

        Raises:
            subprocess.CalledProcessError: a command failed; the log says why.
        """
        if self.is_made():
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as self._out:
            self.run(sys.executable, "-m", "venv", "--clear", self.folder)
            self._install(self)
        self._out = None
        self._stamp.write_text(self._recipe())

    def pip(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """`pip install` in this environment."""
        self.run(self.python, "-m", "pip", "install", *arguments, environment=environment)

    def run(
        self,
        *command: str | Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        assert self._out is not None, "within make() only"
        print("$", *command, file=self._out, flush=True)
        subprocess.run(
            list(command),
            env={**os.environ, **(environment or {})},
            cwd=folder,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=True,
        )

    def reason(self, lines: int = 4) -> str:
        """The end of the log, for an installation that failed."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return " | ".join(text.strip().splitlines()[-lines:])

    def _recipe(self) -> str:
        """What stands in the installing function, its layout and comments apart."""
        code = self._install.__code__
        parts = (code.co_consts[1:], code.co_names, TORCH, TRANSFORMERS, sys.version)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def build_jobs() -> str:
    """Compile jobs of a peer that is built from source: FASTTPS_PEERS_JOBS, or every core."""
    return os.environ.get("FASTTPS_PEERS_JOBS") or str(os.cpu_count() or 1)
