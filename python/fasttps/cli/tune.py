"""`fasttps tune`: measure how this CPU multiplies bf16 fastest, once, and store it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console

import fasttps
from fasttps import _C
from fasttps.bench import limits
from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.progress import Reporter

INSTRUCTIONS = {"dpbf16": "vdpbf16ps zmm", "fma": "vfmadd231ps zmm"}
ROUNDS = 60
HEAD = "# Written by `fasttps tune`: a CPU's vendor, family and model, and how it multiplies bf16."


def run(force: bool) -> None:
    """Measure and store, if this CPU has a choice and it is not known yet.

    Raises:
        CliError: USAGE: there is no folder to store it in, or what is stored is broken.
    """
    out = Console(highlight=False, soft_wrap=True)
    forced = os.environ.pop("FASTTPS_BF16_GEMM", "")
    products = fasttps.isa.bf16_products()
    if len(products) == 1:
        out.print(f"nothing to choose: this CPU multiplies bf16 by {products[0]} alone")
        return
    if not force:
        try:
            product, origin, known = _C.bf16_product()
        except ValueError as error:  # a broken file
            raise CliError(ExitCode.USAGE, str(error)) from error
        if known:
            out.print(f"known already: {product} ({origin}); --force measures again", markup=False)
            return
    if not _C.tuned_path():
        raise CliError(ExitCode.USAGE, "neither XDG_CONFIG_HOME nor HOME says where to store it")
    path = Path(_C.tuned_path())
    threads = torch.get_num_threads()
    with Reporter().step("measuring") as report:
        rates = {}
        for count in sorted({1, threads}):
            rates[count] = limits.peaks(count, ROUNDS)
            report(count, threads, _threads(count))
    for count, found in rates.items():
        for product, instruction in INSTRUCTIONS.items():
            rate = found[instruction]
            out.print(f"{product:<7} {_threads(count)} {rate:8.1f} GFLOP/s  ({instruction})")
    product = max(INSTRUCTIONS, key=lambda name: rates[threads][INSTRUCTIONS[name]])
    try:
        store(path, product)
    except OSError as error:
        raise CliError(ExitCode.USAGE, f"cannot write {path}: {error.strerror}") from error
    out.print(f"{product}, stored in {path} for every later process", markup=False)
    if forced:
        out.print(f"FASTTPS_BF16_GEMM={forced} goes before it where it is set", markup=False)


def store(path: Path, product: str) -> None:
    """Write this CPU's line of the file, and leave those of other CPUs: homes are shared."""
    cpu = [str(word) for word in _C.cpu_model()]
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    others = [line for line in lines if is_line(line) and line.split()[:3] != cpu]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text("\n".join([HEAD, *others, " ".join([*cpu, product])]) + "\n")
    partial.replace(path)


def is_line(line: str) -> bool:
    """Whether a line names a CPU and its product, as the library reads it."""
    words = line.partition("#")[0].split()
    return len(words) == 4 and words[3] in INSTRUCTIONS and all(w.isdigit() for w in words[1:3])


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"
