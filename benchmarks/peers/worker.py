"""The driver's end of a worker process, which stands still while it is not asked anything."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
# Set by hand for another purpose, they would slow every peer that uses OpenMP.
DROPPED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")


class WorkerError(RuntimeError):
    """The worker could not do what it was asked, or is gone."""


def worker_environment(own_venv: bool, passive: bool) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key not in DROPPED}
    paths = [str(BENCHMARKS)]
    if not own_venv and "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if passive:
        environment["OMP_WAIT_POLICY"] = "passive"
    return environment


class Worker:
    """One process of one peer: `ask` runs it, and between two asks it is stopped, spinners too."""

    def __init__(
        self,
        where: str,
        python: str | Path,
        threads: int,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.log = log
        self._buffer = b""
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "peers.serve", where, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                cwd=log.parent,
                start_new_session=True,
            )

    def ask(self, message: Mapping[str, Any], limit_s: float = 3600) -> dict[str, Any]:
        """Send one order and wait for its answer.

        Raises:
            WorkerError: it failed, died, or took longer than `limit_s`.
        """
        assert self._process.stdin is not None
        try:
            self._signal(signal.SIGCONT)
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            reply = json.loads(self._line(time.monotonic() + limit_s))
        except (OSError, ValueError) as error:
            raise WorkerError(f"the worker is gone: {error}; {self.reason()}") from error
        self._signal(signal.SIGSTOP)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            wait_s = deadline - time.monotonic()
            if wait_s <= 0 or not select.select([pipe], [], [], wait_s)[0]:
                raise WorkerError("no answer in time")
            read = os.read(pipe, 1 << 16)
            if not read:
                code = self._process.wait()
                raise WorkerError(f"the worker ended with code {code}; {self.reason()}")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def reason(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1][-300:] if lines else 'it printed nothing'} ({self.log})"

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            raise WorkerError(f"the worker is gone; {self.reason()}") from None

    def close(self) -> None:
        """End the process and all that it started."""
        for number in (signal.SIGKILL, signal.SIGCONT):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
