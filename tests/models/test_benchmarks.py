"""The whole-model benchmark runs, and all ways to answer that it times give one answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import process_environment

pytest.importorskip("transformers", reason="transformers is not installed")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_bench_generate(tmp_path):
    file = tmp_path / "generate.jsonl"
    command = [
        sys.executable,
        BENCHMARKS / "bench_generate.py",
        "--quick",
        "--dtype",
        "float32",
        "--rounds",
        "1",
    ]
    done = subprocess.run(
        [*command, "--json", file],
        env=process_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    ways = [key for key in record if key.endswith("_agreeing_tokens")]
    assert len(ways) == 5
    assert [record[key] for key in ways] == [record["new_tokens"]] * 5
    assert all(record[key] > 0 for key in record if key.endswith("tokens_per_s"))
    assert record["unpatched_dynamic_decode_over_unpatched"] == 1
    assert 0 < record["patched_static_kv_share_of_read_bandwidth"] < 1
    assert record["machine"] and record["commit"] and record["isa"]
