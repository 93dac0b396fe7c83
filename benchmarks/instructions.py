"""Instructions of each kernel: counted by callgrind, and read from the disassembly of its loops.

    .venv/bin/python benchmarks/instructions.py --json benchmarks/results/instructions.jsonl

callgrind runs scalar and AVX2 code only: for those, the instructions of one call (the difference
between two runs of csrc/instructions, which differ by one call). For every instruction set, the
instructions of one iteration of the inner loops that multiply most, by `objdump`.
Neither depends on how busy the machine is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
COUNTED = ("scalar", "avx2")  # what callgrind can run
MULTIPLY = re.compile(r"v?(fn?m(add|sub)|mul|dpbf16|pdpb|pdpw|pmadd|pmull|imul)\w*")
JUMP = re.compile(r"j\w+")
ADDRESS = re.compile(r"^\s*([0-9a-f]+):\t(?:\{\w+\} )?(\S+)\s*(.*)$")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str


def run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"instructions: `{' '.join(map(str, command))}` failed\n{done.stderr}")
    return done.stdout


def tool(name: str, package: str) -> str:
    """The path of a program that pip cannot bring."""
    path = shutil.which(name)
    if path is None:
        sys.exit(f"instructions: {name} is not installed; apt-get install {package} brings it")
    return path


def counted(program: Path, isa: str, case: str) -> int:
    """Instructions of one call, by callgrind."""
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        for repeats in (1, 2):
            file = Path(folder) / str(repeats)
            valgrind = (tool("valgrind", "valgrind"), "--tool=callgrind")
            run(*valgrind, f"--callgrind-out-file={file}", program, isa, case, str(repeats))
            found = re.search(r"^(?:summary|totals): (\d+)", file.read_text(), re.MULTILINE)
            assert found is not None, f"{file} has no total"
            counts.append(int(found[1]))
    return counts[1] - counts[0]


def counted_records(program: Path, only: str) -> Iterator[dict[str, Any]]:
    wanted = []
    for isa in COUNTED:
        if isa in run(program).split():
            lines = [line.split("\t") for line in run(program, isa).splitlines()]
            wanted += [(isa, name, int(work)) for name, work in lines if only in name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counts = pool.map(lambda item: counted(program, *item[:2]), wanted)
        for (isa, name, work), instructions in zip(wanted, counts):
            yield {
                "instructions_of": name.split()[0],
                "case": name,
                "isa": isa,
                "by": "callgrind",
                "instructions": instructions,
                "work": work,
                "instructions_per_work": round(instructions / work, 4),
            }


def functions(disassembly: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Each function of an objdump listing, demangled, with its instructions."""
    name, body = "", []
    for line in disassembly.splitlines():
        if head := FUNCTION.match(line):
            if body:
                yield name, body
            name, body = head[1], []
        elif found := ADDRESS.match(line):
            body.append(Instruction(int(found[1], 16), found[2], found[3]))
    if body:
        yield name, body


def inner_loops(body: list[Instruction]) -> list[list[Instruction]]:
    """The loops that hold no other: from the target of a backward jump to the jump."""
    at = {instruction.address: index for index, instruction in enumerate(body)}
    spans = set()
    for index, instruction in enumerate(body):
        target = re.match(r"([0-9a-f]+) <", instruction.operands)
        if JUMP.fullmatch(instruction.name) and target:
            start = at.get(int(target[1], 16))
            if start is not None and start <= index:
                spans.add((start, index))
    inner = [
        (start, end)
        for start, end in spans
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in spans)
    ]
    return [body[start : end + 1] for start, end in sorted(inner)]


def loop_records(isa: str, disassembly: str) -> Iterator[dict[str, Any]]:
    """The inner loops of each function with at least half the multiplications of its largest."""
    for name, body in functions(disassembly):
        loops = inner_loops(body)
        multiplies = [sum(bool(MULTIPLY.fullmatch(i.name)) for i in loop) for loop in loops]
        function = name.replace("fasttps::cpu::", "").replace("(anonymous namespace)::", "")
        for loop, count in zip(loops, multiplies):
            if count == 0 or 2 * count < max(multiplies):
                continue
            touching = [i.operands for i in loop if i.name not in ("lea", "call")]
            memory = [o for o in touching if "%" in o and "(" in o]
            yield {
                "instructions_of": re.split(r"[<(]", function)[0].split()[-1],
                "case": function,
                "isa": isa,
                "by": "objdump",
                "instructions": len(loop),
                "work": count,
                "instructions_per_work": round(len(loop) / count, 4),
                "stores": sum(operands.endswith(")") for operands in memory),
                "loads": sum(not operands.endswith(")") for operands in memory),
            }


def objects(build: Path) -> dict[str, Path]:
    folder = build / "CMakeFiles/fasttps_cpu_kernels.dir/csrc/cpu/isa"
    return {item.name.removesuffix(".cpp.o"): item for item in sorted(folder.glob("*.o"))}


def build_program(build: Path) -> Path:
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or tool("cmake", "cmake")
    if not (build / "CMakeCache.txt").exists():
        options = ("-DFASTTPS_TORCH=OFF", "-DFASTTPS_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release")
        run(cmake, "-S", ROOT, "-B", build, *options)
    run(cmake, "--build", build, "--target", "fasttps_instructions", "--parallel")
    return build / "csrc/instructions/fasttps_instructions"


def show(records: list[dict[str, Any]], console: Console) -> None:
    for by, work in (("callgrind", "per multiplication"), ("objdump", "per multiply instruction")):
        table = Table("case", "isa", "instructions", work, title=f"by {by}")
        for record in records:
            if record["by"] == by:
                name = record["case"] if len(record["case"]) < 80 else record["case"][:79] + "…"
                ratio = f"{record['instructions_per_work']:.3f}"
                table.add_row(name, record["isa"], f"{record['instructions']:,}", ratio)
        console.print(table)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--build", type=Path, default=ROOT / "build" / "kernels", help="folder")
    options.add_argument("--only", default="", help="cases and functions that hold this word")
    options.add_argument("--json", type=Path, help="append one line of JSON a case to this file")
    chosen = options.parse_args()
    program = build_program(chosen.build)
    records = list(counted_records(program, chosen.only))
    for isa, item in objects(chosen.build).items():
        listing = run(tool("objdump", "binutils"), "-dC", "--no-show-raw-insn", item)
        records += [r for r in loop_records(isa, listing) if chosen.only in r["case"]]
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = harness.FILE_WIDTH
    show(records, console)
    compiler = {"compiler": run(os.environ.get("CXX", "c++"), "--version").splitlines()[0]}
    facts = {"machine": harness.machine(), "commit": harness.commit(), **compiler}
    harness.write_json(chosen.json, [record | facts for record in records])


if __name__ == "__main__":
    main()
