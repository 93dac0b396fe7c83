"""A source distribution, a wheel built from it, and clean environments that they are installed in.

Compiled once: ccache, where there is one, hands the same objects to every build.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.environments import ROOT, Environment, run, tools_path

NOT_SOURCE = {"build", "dist"}
BUILT = {"include", "lib", "share"}


def ignored(folder: str, names: list[str]) -> set[str]:
    ignore = {n for n in names if n == "__pycache__" or n.endswith((".so", ".egg-info", "_cache"))}
    if Path(folder) == ROOT:
        ignore |= {n for n in names if n in NOT_SOURCE or (n[0] == "." and (ROOT / n).is_dir())}
    if Path(folder) == ROOT / "python" / "fasttps":
        ignore |= BUILT & set(names)
    return ignore


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory) -> Path:
    """A copy of the sources as a fresh clone has them."""
    tree = tmp_path_factory.mktemp("source") / "fasttps"
    shutil.copytree(ROOT, tree, ignore=ignored)
    return tree


@pytest.fixture(scope="session")
def sdist(source_tree, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    run(sys.executable, "-c", code, cwd=source_tree)
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def wheel(sdist, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    run(*command, "-w", out, sdist, cwd=out, PATH=tools_path())
    (archive,) = out.glob("*.whl")
    return archive


@pytest.fixture(scope="session")
def wheel_environment(wheel, tmp_path_factory) -> Environment:
    environment = Environment.make(tmp_path_factory.mktemp("wheel-environment"))
    environment.pip_install("--no-index", wheel)
    return environment


@pytest.fixture(scope="session")
def source_environment(source_tree, tmp_path_factory) -> Environment:
    environment = Environment.make(tmp_path_factory.mktemp("source-environment"))
    environment.pip_install(source_tree)
    return environment
