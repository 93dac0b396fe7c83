"""`fasttps info` names what is here and what is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fasttps
from fasttps.cli.errors import ExitCode
from fasttps.cli.info import isa_rows
from tests.support.command import Ran, run_process

Run = Callable[..., Ran]


def test_info_in_a_process() -> None:
    ran = run_process("info")
    assert ran.code == ExitCode.OK, ran.err
    assert ran.err == ""
    assert "\x1b" not in ran.out
    assert f"torch {torch.__version__}" in ran.out
    for isa in fasttps.isa.known():
        assert f"instruction set {isa}: " in ran.out
    for device in ("cpu", "hip", "xdna"):
        assert f"device {device}: " in ran.out
    (formats,) = [line for line in ran.out.splitlines() if line.startswith("packed formats: ")]
    assert formats.split(": ")[1].split(", ") == [f.name.lower() for f in fasttps.ops.PackedFormat]
    assert "reads: " in ran.out and "compressed-tensors" in ran.out


def test_info_names_the_active_isa_and_what_the_others_lack(run: Run) -> None:
    with fasttps.isa.forced("scalar"):
        lines = run("info").out.splitlines()
    assert "instruction set scalar: active" in lines
    for isa in fasttps.isa.known():
        (line,) = [line for line in lines if line.startswith(f"instruction set {isa}: ")]
        lacking = fasttps.isa.missing(isa)
        assert ("cannot run" in line) == bool(lacking)
        assert all(feature in line for feature in lacking)


def test_a_wrong_fasttps_isa_is_marked_and_the_rest_is_told() -> None:
    ran = run_process("info", FASTTPS_ISA="nonsense")
    assert ran.code == ExitCode.OK, ran.err
    (line,) = [line for line in ran.out.splitlines() if "FASTTPS_ISA" in line]
    assert line.startswith("instruction set 'nonsense': is unknown")
    assert "instruction set scalar: runs" in ran.out.splitlines()
    assert "device cpu: " in ran.out
    assert "built with: " in ran.out


def test_a_fasttps_isa_that_this_cpu_lacks_is_marked_in_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def active() -> str:
        raise ValueError("FASTTPS_ISA: this CPU runs scalar; got 'avx512'")

    monkeypatch.setenv("FASTTPS_ISA", "avx512")
    monkeypatch.setattr("fasttps.isa.known", lambda: ["avx512", "scalar"])
    monkeypatch.setattr("fasttps.isa.available", lambda: ["scalar"])
    monkeypatch.setattr("fasttps.isa.active", active)
    monkeypatch.setattr("fasttps.isa.missing", {"avx512": ["avx512f"], "scalar": []}.get)
    wanted, scalar = isa_rows()
    assert wanted[::2] == ("avx512", "avx512f")
    assert wanted[1].startswith("cannot run, but FASTTPS_ISA names it")
    assert scalar == ("scalar", "runs", "")


def test_the_cpu_is_found_and_other_devices_say_what_they_miss(run: Run) -> None:
    lines = [line for line in run("info").out.splitlines() if line.startswith("device ")]
    (cpu,) = [line for line in lines if line.startswith("device cpu: ")]
    assert "missing" not in cpu
    for line in lines:
        if "nothing" in line:
            assert "missing: " in line


def test_the_version(run: Run) -> None:
    ran = run("--version")
    assert (ran.code, ran.out) == (ExitCode.OK, f"fasttps {fasttps.__version__}\n")


def test_help_lists_the_commands(run: Run) -> None:
    ran = run("--help")
    assert ran.code == ExitCode.OK
    assert all(command in ran.out for command in ("generate", "demo", "info"))
