"""scripts/bootstrap.py on machines that lack something, and a second run of what `make` runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from types import ModuleType

import pytest

from tests.support.environments import ROOT

VENV_PYTHON = ROOT / ".venv/bin/python"


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts/bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bare_machine(setup, monkeypatch) -> ModuleType:
    """No compiler, no make, no headers; pip's calls and apt-get's are forbidden."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    monkeypatch.setattr(setup.sysconfig, "get_path", lambda name: "/nonexistent")
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    return setup


def test_missing_packages_are_named_in_one_line(bare_machine, monkeypatch):
    monkeypatch.setattr(bare_machine.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as stopped:
        bare_machine.check_machine()
    message = str(stopped.value)
    assert "\n" not in message
    python = f"python3.{sys.version_info.minor}"
    wanted = ("g++", "make", "libgtest-dev", "libgmock-dev", "nlohmann-json3-dev", f"{python}-venv")
    for package in wanted:
        assert package in message.partition("apt-get install")[2]
    assert "sudo apt-get install" in message


def test_root_gets_them_installed(bare_machine, monkeypatch):
    asked = []

    def apt_install(packages: list[str]) -> bool:
        asked.extend(packages)
        monkeypatch.setattr(bare_machine, "missing_packages", dict)
        return True

    monkeypatch.setattr(bare_machine.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bare_machine.shutil, "which", lambda name: {"apt-get": "apt"}.get(name))
    monkeypatch.setattr(bare_machine, "apt_install", apt_install)
    bare_machine.check_machine()
    assert {"g++", "make", "libgtest-dev", "libgmock-dev", "nlohmann-json3-dev"} <= set(asked)


def test_root_is_told_what_could_not_be_installed(bare_machine, monkeypatch):
    monkeypatch.setattr(bare_machine.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bare_machine.shutil, "which", lambda name: {"apt-get": "apt"}.get(name))
    monkeypatch.setattr(bare_machine, "apt_install", lambda packages: False)
    with pytest.raises(SystemExit, match="this machine lacks a C"):
        bare_machine.check_machine()


@pytest.mark.parametrize(
    ("name", "version", "wanted"),
    [("g++", "11", False), ("g++", "12", True), ("clang++", "15.0.7", False), ("g++", "x", False)],
)
def test_compiler_must_be_new_enough(setup, monkeypatch, tmp_path, name, version, wanted):
    compiler = tmp_path / name
    compiler.write_text(f"#!/bin/sh\necho {version}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert (setup.compiler() is not None) == wanted


def test_step_is_done_once(setup, monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "STAMPS", tmp_path / "stamps")
    file = tmp_path / "pins.txt"
    file.write_text("a==1")
    done = []
    for pins in ("a==1", "a==1", "a==2"):
        file.write_text(pins)
        setup.once("step", [file], lambda pins=pins: done.append(pins))
    assert done == ["a==1", "a==2"]


def test_step_that_failed_is_done_again(setup, monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "STAMPS", tmp_path / "stamps")
    done = []

    def step() -> None:
        done.append(1)
        if len(done) == 1:
            raise OSError

    with pytest.raises(OSError):
        setup.once("step", [], step)
    setup.once("step", [], step)
    assert len(done) == 2


def test_environment_of_someone_else_is_left_alone(setup, monkeypatch, tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/mine").touch()
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup, "STAMPS", tmp_path / ".venv/stamps")
    with pytest.raises(SystemExit, match="not made by this script"):
        setup.make_venv()
    assert (tmp_path / ".venv/mine").exists()


@pytest.mark.skipif(not VENV_PYTHON.exists(), reason="no .venv: `make build` has not run here")
def test_second_build_does_nothing():
    # No network: a step that wanted some would fail.
    offline = {**os.environ, "PIP_NO_INDEX": "1"}
    begin = time.monotonic()
    done = subprocess.run(
        ["make", "build"], cwd=ROOT, env=offline, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "set-up:" not in done.stdout
    assert "Building" not in done.stdout and "Linking" not in done.stdout
    assert "no work to do" in done.stdout
    assert time.monotonic() - begin < 20
