"""Runs the tests in parts, prints what each took, and fails if any part failed.

    python3 scripts/test.py [PART ...]      (`make test`; `make test PARTS="cpu models"`)
    python3 scripts/test.py --long          (`make test-long`)

Later parts run even if an earlier one failed, unless they cannot without it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV_BIN = ROOT / ".venv" / "bin"
REPORTS = ROOT / "build" / "reports"

# What the tests of one folder are called on the command line. test_rooms.py asserts that every
# folder and every file of tests/ belongs to a part.
PYTEST_PARTS = {
    "cpu": ["tests/ops", "tests/reference", "tests/bench"],
    "models": ["tests/models", "tests/generation", "tests/gguf", "tests/checkpoint", "tests/cli"],
    "packaging": ["tests/packaging", "tests/test_*.py"],
}
# GoogleTests of what needs no torch: the program of each, in its build folder.
CPP_TESTS = {"cpp": "csrc/tests/fasttps_cpp_tests", "npu": "fasttps_npu_tests"}
# Tests that wait for Python more than for the kernels: two processes, a file at a time.
IN_PARALLEL = {"models": ("-n", "2", "--dist", "loadfile")}


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __iadd__(self, other: Counts) -> Counts:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        return self


@dataclass
class Part:
    name: str
    run: Callable[[], bool]
    budget_s: int | None = None  # on two cores with empty caches
    needs: list[str] = field(default_factory=list)


def succeeds(*command: str | Path, **environment: str) -> bool:
    line = [str(word) for word in command]
    shown = line if len(line) < 12 else [*line[:4], f"... ({len(line)} words)"]
    print("+", " ".join(shown), flush=True)
    return (
        subprocess.run(line, cwd=ROOT, check=False, env={**os.environ, **environment}).returncode
        == 0
    )


def report(name: str) -> Path:
    REPORTS.mkdir(parents=True, exist_ok=True)
    file = REPORTS / f"{name}.xml"
    file.unlink(missing_ok=True)
    return file


def sources(*suffixes: str) -> list[str]:
    """Our C++ files; the folders of csrc hold no others."""
    return sorted(str(f.relative_to(ROOT)) for s in suffixes for f in ROOT.glob(f"csrc/**/*{s}"))


def setup(*options: str) -> bool:
    return succeeds(sys.executable, ROOT / "scripts/bootstrap.py", *options)


def lint() -> bool:
    return all(
        [
            succeeds(VENV_BIN / "ruff", "check", "--quiet"),
            succeeds(VENV_BIN / "ruff", "format", "--check", "--quiet"),
            succeeds(
                VENV_BIN / "clang-format",
                "--dry-run",
                "-Werror",
                *sources(".h", ".hpp", ".cc", ".cpp"),
            ),
        ]
    )


def build(preset: str = "release", target: str = "all") -> bool:
    script = ROOT / "scripts/build.py"
    return succeeds(VENV_BIN / "python", script, preset, "--target", target)


def gtest(name: str, preset: str) -> bool:
    """One of CPP_TESTS, which the release build has made already."""
    program = ROOT / "build" / preset / CPP_TESTS[name]
    if preset != "release" and not build(preset, program.name):
        return False
    return succeeds(program, "--gtest_brief=1", f"--gtest_output=xml:{report(f'{name}-{preset}')}")


def pytest(name: str, *options: str, paths: list[str] | None = None, **environment: str) -> bool:
    patterns = PYTEST_PARTS[name] if paths is None else paths
    found = [str(f.relative_to(ROOT)) for p in patterns for f in sorted(ROOT.glob(p))]
    return succeeds(
        *(VENV_BIN / "python", "-m", "pytest", "-q", f"--junitxml={report(name)}"),
        *(*options, *found),
        **environment,
    )


def clang_tidy() -> bool:
    """Every file of the library, as the release build compiles it; .clang-tidy has the checks."""
    # The compiler's omp.h, and nothing else of its headers: clang has its own.
    folder = ROOT / "build/clang-tidy"
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run(
        [compiler, "-print-file-name=include/omp.h"], capture_output=True, text=True, check=True
    ).stdout.strip()
    (folder / "omp.h").unlink(missing_ok=True)
    (folder / "omp.h").symlink_to(found)

    def check(unit: str) -> bool:
        command = (
            *(VENV_BIN / "clang-tidy", "--quiet", f"--extra-arg=-isystem{folder}"),
            "--extra-arg=-Wno-unknown-warning-option",  # g++'s own
        )
        return succeeds(*command, "-p", ROOT / "build/release", unit)

    # The kernels of csrc/npu are a core's compiler's.
    apart = ("/tests/", "/examples/", "/npu/kernels/")
    units = [f for f in sources(".cpp") if not any(folder in f for folder in apart)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return all(list(pool.map(check, units)))


QUICK = [
    Part("set-up", setup, budget_s=240),
    Part("lint", lint, needs=["set-up"]),
    Part("build", build, budget_s=360, needs=["set-up"]),
    Part("cpp", lambda: gtest("cpp", "release"), needs=["build"]),
    Part("cpp-asan", lambda: gtest("cpp", "kernels-asan"), needs=["set-up"]),
    Part("npu", lambda: gtest("npu", "release"), budget_s=180, needs=["build"]),
    Part("npu-asan", lambda: gtest("npu", "kernels-asan"), needs=["set-up"]),
    *(
        Part(
            name,
            partial(
                pytest,
                name,
                "-m",
                "not slow",
                *IN_PARALLEL.get(name, ()),
                OMP_WAIT_POLICY="passive",
            ),
            budget_s={"cpu": 240, "models": 240, "packaging": 150}[name],
            needs=["build"],
        )
        for name in PYTEST_PARTS
    ),
]

LONG = [
    Part("set-up", lambda: setup("--long"), budget_s=240),
    Part("build", build, budget_s=360, needs=["set-up"]),
    Part("mypy", lambda: succeeds(VENV_BIN / "python", "-m", "mypy"), needs=["set-up"]),
    Part("clang-tidy", clang_tidy, needs=["build"]),
    Part("cpp-scalar", lambda: gtest("cpp", "kernels-scalar"), needs=["set-up"]),
    Part("cpp-tsan", lambda: gtest("cpp", "kernels-tsan"), needs=["set-up"]),
    Part("slow", partial(pytest, "slow", "-m", "slow", paths=["tests"]), needs=["build"]),
    Part(
        "fuzz",
        partial(pytest, "fuzz", paths=["tests/ops/fuzz"], FASTTPS_FUZZ_EXAMPLES="20000"),
        needs=["build"],
    ),
]


def counts_of(file: Path) -> Counts:
    """The counts of a JUnit file, as pytest and GoogleTest write it."""
    counts = Counts()
    for case in ElementTree.parse(file).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts.failed += 1
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            counts.skipped += 1
        else:
            counts.passed += 1
    return counts


def run(parts: list[Part]) -> int:
    REPORTS.mkdir(parents=True, exist_ok=True)
    for old in REPORTS.glob("*.xml"):
        old.unlink()
    results: dict[str, str] = {}
    rows = []
    for part in parts:
        begin = time.monotonic()
        print(f"\n==== {part.name} ====", flush=True)
        lacking = [need for need in part.needs if results.get(need, "ok") != "ok"]
        if lacking:
            results[part.name] = f"not run: {lacking[0]} failed"
        else:
            results[part.name] = "ok" if part.run() else "FAILED"
        seconds = time.monotonic() - begin
        budget = f"of {part.budget_s}" if part.budget_s else ""
        rows.append(f"{part.name:<12}{seconds:>8.1f} s {budget:<8}{results[part.name]}")
    total = Counts()
    for file in sorted(REPORTS.glob("*.xml")):
        total += counts_of(file)
    print("\npart         seconds   budget  result")
    print("\n".join(rows))
    bad = sum(result != "ok" for result in results.values())
    # A part that fails without a test of its own, such as the build, counts as one.
    failed = max(total.failed, bad)
    print(f"\n{total.passed} passed, {failed} failed, {total.skipped} skipped", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run the tests in parts.")
    parser.add_argument("--long", action="store_true", help="the slow checks instead")
    parser.add_argument("parts", nargs="*", metavar="PART", help="only these; default all")
    arguments = parser.parse_args()
    parts = LONG if arguments.long else QUICK
    unknown = set(arguments.parts) - {part.name for part in parts}
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; {', '.join(p.name for p in parts)}")
    if not arguments.parts:
        sys.exit(run(parts))
    sys.exit(run([part for part in parts if part.name in arguments.parts]))
