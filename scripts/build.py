"""Builds the C++ side and installs it in place, into python/fasttps.

    .venv/bin/python scripts/build.py [PRESET] [--target TARGET]

PRESET is one of CMakePresets.json; `release` (the default) is the one that is installed. Nothing is
rebuilt that has not changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


def build(preset: str, target: str = "all") -> None:
    build_dir = ROOT / "build" / preset
    # Ninja calls CMake again when a CMake file changes; only what CMake does not watch is left.
    presets = ROOT / "CMakePresets.json"
    stamp = build_dir / "configured"
    wanted = presets.read_text() + sys.executable + os.environ.get("CMAKE_ARGS", "")
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(build_dir, ignore_errors=True)
        configure = [
            *(tool("cmake"), "--preset", preset, "-S", str(ROOT)),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            *([f"-DPython_EXECUTABLE={sys.executable}"] if preset == "release" else []),
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        subprocess.run(configure, check=True, cwd=ROOT)
        stamp.write_text(wanted)
    subprocess.run([tool("cmake"), "--build", str(build_dir), "--target", target], check=True)
    if preset == "release":
        install = [tool("cmake"), "--install", str(build_dir)]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the C++ side.")
    parser.add_argument("preset", nargs="?", default="release")
    parser.add_argument("--target", default="all")
    arguments = parser.parse_args()
    try:
        build(arguments.preset, arguments.target)
    except subprocess.CalledProcessError as error:
        sys.exit(f"fasttps: build: `{' '.join(map(str, error.cmd))}` failed")
