"""Importing under another torch, half built, or for another Python: one clear error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fasttps

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


@pytest.fixture
def package(tmp_path) -> Path:
    """A copy of the package that runs, to be broken."""
    ignore = shutil.ignore_patterns("__pycache__")
    copy = tmp_path / "fasttps"
    shutil.copytree(Path(fasttps.__file__).parent, copy, ignore=ignore)
    return copy


def import_error(package: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import fasttps"],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_another_torch_is_refused_before_anything_is_loaded(package):
    facts = package / "lib/build_facts.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "torch": "2.12.9+other"}))
    # The library cannot even be opened, and yet it is the version that is reported.
    (package / "lib/libfasttps.so").write_bytes(b"not a library")
    error = import_error(package)
    assert error.startswith("ImportError: fasttps:")
    for part in ("2.12.9+other", torch.__version__, REBUILD):
        assert part in error


def test_missing_library_says_how_to_build(package):
    (package / "lib/libfasttps.so").unlink()
    error = import_error(package)
    assert error.startswith("ImportError: fasttps:")
    assert "make build" in error and REBUILD in error


def test_broken_library_says_how_to_rebuild(package):
    (package / "lib/libfasttps.so").write_bytes(b"not a library")
    error = import_error(package)
    assert error.startswith("ImportError: fasttps:")
    assert REBUILD in error


def test_module_of_another_python_says_how_to_rebuild(package):
    for module in package.glob("_C.*.so"):
        module.rename(module.with_name("_C.cpython-399-x86_64-linux-gnu.so"))
    error = import_error(package)
    assert error.startswith("ImportError: fasttps:")
    assert REBUILD in error


def test_lazy_names_are_listed_and_unknown_ones_are_errors():
    assert {"patch", "Patch", "PatchError", "StaticKVCache"} <= set(dir(fasttps))
    assert fasttps.patch.__module__ == "fasttps.models.patch"
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        fasttps.nope  # noqa: B018
