"""`fasttps info` names what is here and what is missing."""

from __future__ import annotations

from collections.abc import Callable

import torch

import fasttps
from fasttps.cli.errors import ExitCode
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


def test_info_names_the_active_isa_and_what_the_others_lack(run: Run) -> None:
    with fasttps.isa.forced("scalar"):
        lines = run("info").out.splitlines()
    assert "instruction set scalar: active" in lines
    for isa in fasttps.isa.known():
        (line,) = [line for line in lines if line.startswith(f"instruction set {isa}: ")]
        lacking = fasttps.isa.missing(isa)
        assert ("cannot run" in line) == bool(lacking)
        assert all(feature in line for feature in lacking)


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
