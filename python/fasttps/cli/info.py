"""`fasttps info`: what this machine has for FastTPS, and what is missing for the rest."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import fasttps
from fasttps import _C

PACKAGES = ("torch", "transformers", "accelerate", "gguf", "safetensors", "tokenizers")
READS = "HuggingFace folders (floats, AWQ, GPTQ, compressed-tensors), GGUF files"
PROBE_OP = "fasttps::kv_cache_update_"  # the first op that a backend registers


@dataclass(frozen=True)
class Device:
    """A device that FastTPS knows.

    Attributes:
        name: as in `model.to(name)`.
        found: what of it is here, in words.
        missing: what its ops would still need; empty where they run.
    """

    name: str
    found: list[str]
    missing: list[str]


def run() -> None:
    """Print the facts on standard output."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"fasttps {fasttps.__version__} · python {platform.python_version()}")
    console.print(f"CPU: {cpu_name()} · {torch.get_num_threads()} threads", markup=False)
    _show(console, ("instruction set", "", "missing CPU features"), isa_rows())
    console.print(f"bf16 products: {bf16_line()}", markup=False)
    _show(console, ("device", "found", "missing"), [_device_row(device) for device in devices()])
    formats = ", ".join(kind.name.lower() for kind in fasttps.ops.PackedFormat)
    console.print(f"packed formats: {formats}", markup=False)
    console.print(f"reads: {READS}", markup=False)
    versions = [f"{name} {package_version(name) or 'not installed'}" for name in PACKAGES]
    console.print(" · ".join(versions), markup=False)
    built = " · ".join(f"{name} {value}" for name, value in _C.build_facts().items())
    console.print(f"built with: {built}", markup=False)


def isa_rows() -> list[tuple[str, str, str]]:
    """Each instruction set of this build: its name, its state, what the CPU lacks for it.

    Where FASTTPS_ISA names one that cannot run here, none is active and the one named says so.
    """
    known = fasttps.isa.known()
    state = dict.fromkeys(known, "cannot run")
    state.update(dict.fromkeys(fasttps.isa.available(), "runs"))
    try:
        state[fasttps.isa.active()] = "active"
    except ValueError as error:
        wanted = os.environ.get("FASTTPS_ISA", "")
        name, why = (wanted, "cannot run") if wanted in known else (repr(wanted), "is unknown")
        state[name] = f"{why}, but FASTTPS_ISA names it: nothing runs until that is changed"
        if wanted in fasttps.isa.available():  # FASTTPS_BF16_GEMM contradicts it
            state[name] = f"nothing runs until this is changed: {error}"
    for name in known:
        if not fasttps.isa.is_proven(name):
            state[name] += " (tested by emulation, not yet run on such a CPU)"
    return [
        (name, text, ", ".join(fasttps.isa.missing(name)) if name in known else "")
        for name, text in state.items()
    ]


def bf16_line() -> str:
    """How bf16 is multiplied and who chose it, or what is wrong with the choice."""
    try:
        return f"{fasttps.isa.bf16_product()} ({fasttps.isa.bf16_product_origin()})"
    except ValueError as error:
        return f"nothing runs until this is changed: {error}"


def devices() -> list[Device]:
    """The devices of the project, those that run here first."""
    every = [_cpu(), _hip(), _xdna()]
    return sorted(every, key=lambda device: bool(device.missing))


def cpu_name() -> str:
    """The CPU's model name as the kernel states it, or the machine's architecture."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_ops(dispatch_key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(PROBE_OP, dispatch_key)


def _cpu() -> Device:
    missing = [] if _has_ops("CPU") else ["ops for the CPU in this build"]
    return Device("cpu", [cpu_name()], missing)


def _hip() -> Device:
    """An AMD GPU: the kernel driver shows as /dev/kfd, and torch must be a ROCm build."""
    found, missing = [], []
    if Path("/dev/kfd").exists():
        found.append("/dev/kfd")
    else:
        missing.append("an AMD GPU with its driver (/dev/kfd)")
    if torch.version.hip:
        found.append(f"torch for ROCm {torch.version.hip}")
        if torch.cuda.is_available():
            found.append(torch.cuda.get_device_name(0))
        else:
            missing.append("a GPU that torch can use")
    else:
        missing.append("a ROCm build of torch")
    if not _has_ops("CUDA"):  # ROCm builds of torch use CUDA's dispatch key
        missing.append("ops for hip in this build")
    return Device("hip", found, missing)


def _xdna() -> Device:
    """An AMD NPU: the driver amdxdna shows it as /dev/accel, and XRT must be installed."""
    found, missing = [], []
    nodes = sorted(str(path) for path in Path("/dev/accel").glob("accel*"))
    driver = Path("/sys/module/amdxdna").exists()
    found += ["driver amdxdna"] if driver else []
    missing += [] if driver else ["the driver amdxdna"]
    found += nodes[:1]
    missing += [] if nodes else ["an AMD NPU (/dev/accel)"]
    xrt = ctypes.util.find_library("xrt_coreutil")
    found += [xrt] if xrt else []
    missing += [] if xrt else ["XRT (libxrt_coreutil.so)"]
    if not _has_ops("PrivateUse1"):
        missing.append("ops for xdna in this build")
    return Device("xdna", found, missing)


def _device_row(device: Device) -> tuple[str, str, str]:
    return device.name, ", ".join(device.found) or "nothing", ", ".join(device.missing)


def _show(console: Console, heads: tuple[str, str, str], rows: list[tuple[str, str, str]]) -> None:
    """A table on a terminal; without one, a line a row."""
    if not console.is_terminal:
        for name, middle, missing in rows:
            line = f"{heads[0]} {name}: {middle}"
            console.print(line + (f"; missing: {missing}" if missing else ""), markup=False)
        return
    table = Table(*heads)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
