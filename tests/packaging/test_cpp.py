"""C++ programs find the installed package with find_package(fasttps) and call the ops."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.environments import ROOT, run, tools_path

EXAMPLE = ROOT / "csrc/examples/decode_step"


@pytest.fixture(scope="module")
def cmake_prefix_path(wheel_environment) -> str:
    return wheel_environment.run_python("import fasttps; print(fasttps.cmake_prefix_path)")


def configure(source: Path, build: Path, *options: str) -> str:
    command = ("cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release")
    return run(*command, *options, cwd=source, PATH=tools_path())


def test_example_runs_on_the_installed_package(cmake_prefix_path, tmp_path):
    source = tmp_path / "decode_step"
    shutil.copytree(EXAMPLE, source)
    build = tmp_path / "build"
    configure(source, build, f"-DCMAKE_PREFIX_PATH={cmake_prefix_path}")
    run("cmake", "--build", build, cwd=build, PATH=tools_path())
    answers = run(build / "decode_step", cwd=build)
    assert "WRONG" not in answers
    assert [line.split()[0] for line in answers.splitlines()] == [
        "attention",
        "window",
        "mlp",
        "layer",
    ]


def test_package_refuses_another_torch(cmake_prefix_path, tmp_path):
    torch = tmp_path / "libtorch"
    (torch / "share/cmake/Torch").mkdir(parents=True)
    (torch / "share/cmake/Torch/TorchConfig.cmake").touch()
    headers = torch / "include/torch/csrc/api/include/torch"
    headers.mkdir(parents=True)
    parts = {"MAJOR": 1, "MINOR": 2, "PATCH": 3}
    lines = [f"#define TORCH_VERSION_{name} {number}" for name, number in parts.items()]
    (headers / "version.h").write_text("\n".join(lines))
    with pytest.raises(AssertionError, match=r"built for torch [0-9.]+, found 1\.2\.3"):
        configure(
            EXAMPLE,
            tmp_path / "build",
            f"-DCMAKE_PREFIX_PATH={cmake_prefix_path}",
            f"-DTorch_ROOT={torch}",
        )
