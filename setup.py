"""Builds the C++ side with CMake and puts it into the package (pyproject.toml has the rest).

Environment: CMAKE_ARGS adds options to CMake's, CMAKE_BUILD_PARALLEL_LEVEL limits the jobs,
FASTTPS_SKIP_NATIVE=1 leaves the C++ side out (`make build` then builds it in place).
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def tool(name: str) -> str:
    """`name` of this environment (pip's cmake and ninja), else of the machine."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise SystemExit(f"fasttps: {name} is not installed; `pip install {name}` brings it")
    return path


class CMakeBuild(build_ext):
    """Configures, builds and installs into the package folder: in place if editable."""

    def run(self) -> None:
        if os.environ.get("FASTTPS_SKIP_NATIVE") == "1":
            return
        if importlib.util.find_spec("torch") is None:
            raise SystemExit(
                "fasttps: the build environment has no torch; install torch first, then build with "
                "`pip install --no-build-isolation .`, since the library fits one torch only"
            )
        in_place = bool(self.inplace or getattr(self, "editable_mode", False))
        parent = ROOT / "python" if in_place else Path(self.build_lib).resolve()
        build_dir = ROOT / "build" / ("in-place" if in_place else "wheel")
        cmake = tool("cmake")
        configure = [
            *(cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DCMAKE_INSTALL_PREFIX={parent / 'fasttps'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DFASTTPS_IN_PLACE={'ON' if in_place else 'OFF'}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        for command in (
            configure,
            [cmake, "--build", str(build_dir)],
            [cmake, "--install", str(build_dir)],
        ):
            subprocess.run(command, check=True)

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(ext_modules=[Extension("fasttps._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
