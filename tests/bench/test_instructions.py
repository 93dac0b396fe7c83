"""Instruction counts: inner loops out of a disassembly, and a driver that knows every kernel."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "release" / "csrc" / "instructions" / "fasttps_instructions"

needs_program = pytest.mark.skipif(not PROGRAM.exists(), reason="`make build` makes the driver")

DISASSEMBLY = """
0000000000000000 <fasttps::cpu::(anonymous namespace)::kernel<Vec>(Task const&)>:
       0:\tpush   %rbx
      10:\txor    %eax,%eax
      20:\tvmovups (%rsi,%rax,4),%zmm0
      26:\tvfmadd231ps (%rdi,%rax,4){1to16},%zmm0,%zmm1
      2c:\tvfmadd231ps %zmm2,%zmm0,%zmm3
      32:\tadd    $0x10,%rax
      36:\tcmp    %rdx,%rax
      39:\tjb     20 <fasttps::cpu::(anonymous namespace)::kernel<Vec>(Task const&)+0x20>
      3b:\tvmovups %zmm1,(%rcx)
      41:\tdec    %r8
      44:\tjne    10 <fasttps::cpu::(anonymous namespace)::kernel<Vec>(Task const&)+0x10>
      46:\tret

0000000000000050 <fasttps::cpu::(anonymous namespace)::moves(void*)>:
      50:\tmov    (%rsi),%rax
      54:\tmov    %rax,(%rdi)
      58:\tloopne 50 <fasttps::cpu::(anonymous namespace)::moves(void*)>
      5a:\tjmp    50 <fasttps::cpu::(anonymous namespace)::moves(void*)>
"""


@pytest.fixture(scope="module")
def instructions() -> ModuleType:
    benchmarks = ROOT / "benchmarks"
    spec = importlib.util.spec_from_file_location("instructions", benchmarks / "instructions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(benchmarks))  # it imports the harness beside it
    sys.modules["instructions"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(benchmarks))
    return module


def test_the_inner_loop_is_found_and_counted(instructions: ModuleType) -> None:
    (record,) = instructions.loop_records("avx512", DISASSEMBLY)
    assert record["instructions_of"] == "kernel"
    assert record["case"] == "kernel<Vec>(Task const&)"
    # From the load at 20 to the jump at 39: two of the six multiply, two read memory.
    assert (record["instructions"], record["work"]) == (6, 2)
    assert (record["loads"], record["stores"]) == (2, 0)
    assert record["instructions_per_work"] == 3.0


@needs_program
def test_every_kernel_of_every_isa_can_be_counted() -> None:
    def driver(*words: str) -> list[str]:
        done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert "scalar" in driver()
    for isa in driver():
        cases = [line.split("\t") for line in driver(isa)]
        assert len(cases) > 20 and all(int(work) > 0 for _, work in cases)
        for name, _ in cases:
            driver(isa, name, "1")
    wrong = subprocess.run([PROGRAM, "nonsense"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "usage" in wrong.stderr


@needs_program
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_callgrind_counts_one_call(instructions: ModuleType) -> None:
    case = "merge_attention float32 count 1024"
    scalar = instructions.counted(PROGRAM, "scalar", case)
    avx2 = instructions.counted(PROGRAM, "avx2", case)
    assert 4 * 1024 < scalar < 100 * 1024
    assert avx2 < scalar
