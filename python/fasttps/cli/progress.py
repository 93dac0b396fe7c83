"""Progress of loading and packing on standard error: a bar, or plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# What a step calls as it advances: steps done, steps in all, the name of the one just done.
Report = Callable[[int, int, str], None]


class Reporter:
    """Shows the steps of one command, one after another."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, title: str) -> Iterator[Report]:
        """Show a step while the block runs; the block may report how far it is.

        Without a terminal: one line when the step begins, one with its time when it has ended.
        """
        if not self.console.is_terminal:
            begin = time.perf_counter()
            self.line(f"{title} ...")
            yield lambda done, total, name: None
            self.line(f"{title}: {time.perf_counter() - begin:.1f} s")
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[name]}", markup=False),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(title, total=None, name="")

            def report(done: int, total: int, name: str) -> None:
                bar.update(task, completed=done, total=total, name=name)

            yield report
            total = bar.tasks[0].total or 1
            bar.update(task, completed=total, total=total, name="")

    def line(self, text: str) -> None:
        """One line of plain text."""
        self.console.print(text, markup=False)
