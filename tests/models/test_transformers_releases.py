"""The same tests under older releases of transformers, in which the cache goes by another name.

Each lives in a folder of its own, which `make test` fills; FASTTPS_TRANSFORMERS_5_12 and
FASTTPS_TRANSFORMERS_4_57 name them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import process_environment
from tests.support.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
SAME = (
    "test_patch_tokens.py",
    "test_patch_undo.py",
    "test_patch_weights.py",
    "test_patch_copies.py",
    "test_patch_head.py",
    "test_patch_quantised.py",
    "test_packed_model.py",
    "test_patch_ops.py",
    "test_kv_cache.py",
    "test_attention_interface.py",
)
# Of these, which start processes, one is enough for another version.
ONE_OF = "test_it_registers_without_importing_transformers"
BUT = (f"{ONE_OF}[transformers first]", f"{ONE_OF}[models first]")


RELEASES = ("5.12", "4.57")


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def environment(release):
    variable = f"FASTTPS_TRANSFORMERS_{release.replace('.', '_')}"
    folder = os.environ.get(variable, "")
    if not (Path(folder) / "transformers").is_dir():
        pytest.skip(f"{variable} names no folder with transformers {release}")
    ours = process_environment()
    return {**ours, "PYTHONPATH": os.pathsep.join([folder, ours["PYTHONPATH"]])}


def run(environment, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )


def test_it_is_another_version(environment, release):
    done = run(environment, "-c", "import transformers; print(transformers.__version__)")
    assert done.stdout.startswith(f"{release}."), done.stderr


def run_tests(environment, *arguments):
    """How many passed."""
    done = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-6000:]
    return int(passed[1])


def test_greedy_tokens_of_every_family(environment):
    assert run_tests(environment, "tests/models/test_greedy.py") == len(FAMILIES)


@pytest.mark.parametrize("release", ["5.12"], indirect=True, scope="module")
def test_the_same_tests_pass(environment):
    files = [f"tests/models/{file}" for file in SAME]
    but = [f"--deselect=tests/models/test_attention_interface.py::{test}" for test in BUT]
    assert run_tests(environment, *files, *but) > 200
