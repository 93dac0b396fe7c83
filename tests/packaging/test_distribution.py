"""What the source distribution and the wheel hold."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile

import pytest

from tests.support.environments import run


@pytest.fixture(scope="module")
def sdist_names(sdist) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames() if "/" in name}


@pytest.fixture(scope="module")
def wheel_names(wheel) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_sdist_holds_every_source(source_tree, sdist_names):
    sources = {str(f.relative_to(source_tree)) for f in source_tree.rglob("*") if f.is_file()}
    wanted = {name for name in sources if "egg-info" not in name}
    assert wanted - sdist_names == set()


def test_sdist_holds_nothing_built(sdist_names):
    built = [name for name in sdist_names if name.endswith((".so", ".o", ".pyc"))]
    assert built == []
    assert not any(name.startswith(("build/", "python/fasttps/lib/")) for name in sdist_names)


def test_wheel_holds_the_package(source_tree, wheel_names):
    package = source_tree / "python"
    wanted = {
        str(file.relative_to(package))
        for suffix in ("*.py", "*.pyi", "py.typed")
        for file in package.rglob(suffix)
    }
    assert "fasttps/_C.pyi" in wanted and "fasttps/py.typed" in wanted
    assert wanted - wheel_names == set()


def test_wheel_holds_the_native_side(wheel_names):
    wanted = {
        "fasttps/lib/libfasttps.so",
        "fasttps/lib/build_facts.json",
        "fasttps/include/fasttps/fasttps.h",
        "fasttps/share/cmake/fasttps/fasttpsConfig.cmake",
        "fasttps/share/cmake/fasttps/fasttpsConfigVersion.cmake",
        "fasttps/share/cmake/fasttps/fasttpsTargets.cmake",
        "fasttps/share/cmake/fasttps/FastTPSTorch.cmake",
    }
    assert wanted - wheel_names == set()
    modules = [n for n in wheel_names if n.startswith("fasttps/_C.") and n.endswith(".so")]
    assert len(modules) == 1


def test_wheel_holds_nothing_else(wheel_names):
    roots = {name.split("/")[0] for name in wheel_names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"fasttps"}
    info = next(root for root in roots if root.endswith(".dist-info"))
    assert f"{info}/licenses/LICENSE" in wheel_names


def test_wheel_is_of_one_python_and_platform(wheel):
    assert "-cp3" in wheel.name
    assert "none-any" not in wheel.name


def test_wheel_says_what_it_needs(wheel, wheel_names):
    name = next(name for name in wheel_names if name.endswith(".dist-info/METADATA"))
    metadata = zipfile.ZipFile(wheel).read(name).decode().splitlines()
    assert "Requires-Dist: torch" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    extras = {line.split()[1] for line in metadata if line.startswith("Provides-Extra:")}
    assert extras == {"cli", "dev", "hf"}


def test_library_finds_torch_beside_it_and_nowhere_else(wheel_environment):
    library = wheel_environment.site_packages / "fasttps/lib/libfasttps.so"
    dynamic = run("readelf", "-d", library, cwd=library.parent)
    paths = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "RUNPATH" in line]
    assert paths == ["$ORIGIN/../../torch/lib"]


def test_library_says_nothing_of_where_it_was_built(wheel_environment, source_tree):
    # Messages of exceptions name the source file: by its path in the project.
    library = wheel_environment.site_packages / "fasttps/lib/libfasttps.so"
    strings = subprocess.run(
        ["strings", "-a", library], capture_output=True, text=True, check=True
    ).stdout
    assert str(source_tree.parent) not in strings
