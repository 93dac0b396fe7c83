"""What a patch did to each module that it looked at, and how that prints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ReportEntry:
    """What became of one module: `op` it was fused with, or the `reason` why it was skipped.

    Attributes:
        formats: what its weights are packed as, None where none are.
        lossy: whether they are not what they were.
    """

    name: str
    class_name: str
    op: str | None
    reason: str | None = None
    formats: str | None = None
    lossy: bool = False

    @property
    def outcome(self) -> str:
        if self.op is None:
            return f"skipped: {self.reason}"
        return f"-> {self.op}, {self.formats} (lossy)" if self.lossy else f"-> {self.op}"


@dataclass(frozen=True)
class PatchReport:
    """Every module that was looked at; prints as a table with like modules in one line.

    `undo` says what `Patch.undo` can do, where the patch is lossy.
    """

    model: str
    entries: tuple[ReportEntry, ...]
    undo: str | None = None

    @property
    def fused(self) -> tuple[ReportEntry, ...]:
        return tuple(entry for entry in self.entries if entry.op is not None)

    @property
    def skipped(self) -> tuple[ReportEntry, ...]:
        return tuple(entry for entry in self.entries if entry.op is None)

    def __str__(self) -> str:
        head = f"{self.model}: {len(self.fused)} modules fused, {len(self.skipped)} skipped"
        if self.undo is not None:
            head += f"; {self.undo}"
        return "\n".join([head, *(f"  {line}" for line in self._lines())])

    def _lines(self) -> Iterator[str]:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for entry in self.entries:
            key = (_pattern(entry.name), entry.class_name, entry.outcome)
            groups.setdefault(key, []).append(entry.name)
        for (_, class_name, outcome), names in groups.items():
            yield f"{join_names(names) or 'the model'} ({class_name}) {outcome}"


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def join_by_pattern(names: Iterable[str]) -> str:
    """Names that differ in numbers alone as one, the rest one after the other."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return ", ".join(join_names(group) for group in groups.values())


def join_names(names: Iterable[str]) -> str:
    """model.layers.0.mlp, model.layers.1.mlp, ... as model.layers.[0-29].mlp."""
    names = list(names)
    numbers = [re.findall(r"\d+", name) for name in names]
    varying = [at for at in range(len(numbers[0])) if len({row[at] for row in numbers}) > 1]
    if len(names) == 1 or len(varying) != 1:
        return ", ".join(names)
    pieces = re.split(r"(\d+)", names[0])
    pieces[2 * varying[0] + 1] = f"[{_ranges(sorted(int(row[varying[0]]) for row in numbers))}]"
    return "".join(pieces)


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
