"""The devices that op tests run on. A new one adds its own file here and one line to DEVICES."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttps import isa, ops, reference


def _everything(op: str, arguments: dict[str, Any]) -> str | None:
    return None


@dataclass(frozen=True, repr=False)
class Device:
    """Where an op runs, and what it can be asked there."""

    name: str  # "cpu/avx2": what a test's id shows
    torch_device: torch.device
    missing: Callable[[], str | None]  # why it cannot run here; None: it can
    active: Callable[[], AbstractContextManager[Any]]  # inside it, calls run on this device
    max_bytes: int = 1 << 62  # of the tensors of one call together
    # (op, keyword arguments) -> why this device declares that it cannot run the case; None: it can.
    unsupported: Callable[[str, dict[str, Any]], str | None] = _everything
    functions: ModuleType = ops  # where `call` finds an op by its name

    def __repr__(self) -> str:
        return self.name

    @property
    def family(self) -> str:
        """The part of the name that all variants of one torch device share."""
        return self.name.split("/")[0]

    def tensor(self, source: Tensor) -> Tensor:
        """A copy of a CPU tensor in storage of its own on this device, with the same strides."""
        if source.numel() == 0:
            return source.to(self.torch_device, copy=True)
        # An expanded dimension is copied once and expanded again: its elements share addresses.
        one = source
        for dim in range(source.dim()):
            if source.stride(dim) == 0:
                one = one.narrow(dim, 0, 1)
        copy = torch.empty_strided(
            one.size(), one.stride(), dtype=source.dtype, device=self.torch_device
        )
        return copy.copy_(one).expand(source.size())

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments with every tensor, also in lists, copied to this device.

        A tensor on another device than the CPU stays there: that is the case under test.
        """
        return {name: self._moved(value) for name, value in values.items()}

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "cpu":
            return self.tensor(value)
        if isinstance(value, list):
            return [self._moved(item) for item in value]
        return value

    def call(self, op: str, **arguments: Any) -> Any:
        """The op on tensors of this device; a skip where the device declares a gap."""
        reason = self.unsupported(op, arguments)
        if reason is not None:
            pytest.skip(f"{self.name}: {reason}")
        size_bytes = sum(_bytes(value) for value in arguments.values())
        if size_bytes > self.max_bytes:
            pytest.skip(f"{self.name}: {size_bytes} bytes, at most {self.max_bytes}")
        return getattr(self.functions, op)(**arguments)


def _bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(_bytes(item) for item in value)
    return value.nbytes if isinstance(value, Tensor) else 0


def cpu_devices() -> Iterator[Device]:
    """One device for each instruction set that the library knows, the fastest first."""
    for name in isa.known():

        def missing(name: str = name) -> str | None:
            features = isa.missing(name)
            return f"this CPU lacks {', '.join(features)}" if features else None

        yield Device(
            name=f"cpu/{name}",
            torch_device=torch.device("cpu"),
            missing=missing,
            active=lambda name=name: isa.forced(name),
        )


def reference_device() -> Device:
    """The plain-PyTorch twins: they meet the same tests as the kernels."""
    return Device(
        name="reference",
        torch_device=torch.device("cpu"),
        missing=lambda: None,
        active=nullcontext,
        max_bytes=1 << 28,
        functions=reference,
    )


DEVICES = [*cpu_devices(), reference_device()]


def one_of_each_family() -> list[Device]:
    """For what does not depend on the variant: the fastest device of each family that runs here.

    The twins are no ops: they check nothing and have no schema. A family of which nothing runs
    here is kept, so that its skip is seen.
    """
    chosen: dict[str, Device] = {}
    for device in DEVICES:
        if device.functions is not ops:
            continue
        kept = chosen.get(device.family)
        if kept is None or (kept.missing() and not device.missing()):
            chosen[device.family] = device
    return list(chosen.values())
