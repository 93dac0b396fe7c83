"""The whole-model benchmark runs, and all exact ways that it times give one answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import process_environment

pytest.importorskip("transformers", reason="transformers is not installed")

LOOPS = ("transformers", "fasttps")
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
    records = [json.loads(line) for line in file.read_text().splitlines()]
    ways = [(r["generate"], r["attention"], r["weights"]) for r in records]
    both = [(loop, "fasttps", w) for w in ("f32", "int8", "int4") for loop in LOOPS]
    assert ways == [("transformers", "eager", "f32"), ("transformers", "sdpa", "f32"), *both]
    exact = [record for record in records if record["weights"] == "f32"]
    assert all(record["agreeing_tokens"] == record["new_tokens"] for record in exact)
    assert all(record[key] > 0 for record in records for key in record if key.endswith("per_s"))
    assert records[0]["decode_over_eager"] == records[1]["decode_over_sdpa"] == 1
    assert all(record["met"] is None for record in records), "the aims are of bfloat16"
    sizes = [record["bytes_per_token"] for record in records]
    assert sizes[2] == sizes[3] > 2 * sizes[4] > 2 * sizes[6]
    assert all(record["machine"] and record["commit"] and record["isa"] for record in records)


def test_bench_load_gguf(tmp_path):
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    file = tmp_path / "load.jsonl"
    command = [sys.executable, BENCHMARKS / "bench_load_gguf.py", "--quick", "--gb", "0.01"]
    options = ["--types", "Q4_0", "Q6_K", "--folder", tmp_path, "--json", file]
    done = subprocess.run(
        [*command, *options],
        env=process_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["blocks"] for record in records] == ["Q4_0", "Q6_K"]
    for record in records:
        assert record["file_bytes"] > 10**7
        assert record["load_s"] > 0 and record["dd_s"] > 0
        assert record["met"] == (record["of_dd"] >= 0.8)
        assert record["machine"] and record["commit"] and record["threads"]
