"""The same tests under transformers 5.12, in which the cache goes by another name.

That version lives in a folder of its own, which `make test` fills; FASTTPS_TRANSFORMERS_5_12
names it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import process_environment

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


@pytest.fixture(scope="module")
def environment():
    folder = os.environ.get("FASTTPS_TRANSFORMERS_5_12", "")
    if not (Path(folder) / "transformers").is_dir():
        pytest.skip("FASTTPS_TRANSFORMERS_5_12 names no folder with transformers 5.12")
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


def test_it_is_another_version(environment):
    done = run(environment, "-c", "import transformers; print(transformers.__version__)")
    assert done.stdout.startswith("5.12."), done.stderr


def test_the_same_tests_pass(environment):
    files = [f"tests/models/{file}" for file in SAME]
    but = [f"--deselect=tests/models/test_attention_interface.py::{test}" for test in BUT]
    done = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *but)
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 200, done.stdout[-6000:]
