"""The project's own benchmarks run with --quick, and hold their work against the ruler."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fasttps.bench import BrokenRulerError, Timing
from tests.support.command import process_environment

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(name: str, file: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--rounds", "1", *options]
    done = subprocess.run(
        [*command, "--json", file],
        env=process_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("harness", BENCHMARKS / "harness.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_limits(tmp_path: Path) -> None:
    records = run("limits", tmp_path / "limits.jsonl", "--threads", "2")
    kinds = {record["limit"] for record in records}
    assert kinds >= {"read", "dispatch", "region", "barrier"}
    reads = [record for record in records if record["limit"] == "read"]
    assert {record["threads"] for record in reads} == {1, 2}
    assert all(record["gb_per_s"] > 0 and record["loop"] for record in reads)
    assert {r["of"] for r in records if r["limit"] == "region"} == {
        "empty OpenMP region, active",
        "empty OpenMP region, passive",
    }
    assert all(record["machine"] and record["commit"] for record in records)


def test_an_op_is_held_against_the_ruler(tmp_path: Path) -> None:
    (record,) = run("bench_rope_attention_decode", tmp_path / "decode.jsonl")
    assert record["share_of_read_bandwidth"] > 0
    assert record["read_loop"]


def test_a_case_faster_than_the_ruler_fails(harness: ModuleType) -> None:
    class Limit:
        rate, best = 10.0, "avx2 x1"

    case = harness.Case("a shape", torch.bfloat16, {}, read_bytes=10_000)
    timing = Timing(median_us=1.0, fastest_us=1.0, slowest_us=1.0)  # 10 GB/s
    record = harness.record_of("an_op", case, {"fasttps": timing}, {"read": Limit()})
    assert record["share_of_read_bandwidth"] == 1.0
    faster = Timing(median_us=0.9, fastest_us=0.9, slowest_us=0.9)
    with pytest.raises(BrokenRulerError, match="an_op, a shape runs at 11"):
        harness.record_of("an_op", case, {"fasttps": faster}, {"read": Limit()})
    record = harness.record_of("an_op", case, {"fasttps": faster}, {"read": Limit()}, strict=False)
    assert record["share_of_read_bandwidth"] == pytest.approx(1.1111)
    assert "broken ruler: an_op" in record["broken_ruler"]


def test_written_bytes_count_for_no_share(harness: ModuleType) -> None:
    class Limit:
        rate, best = 10.0, "avx2 x1"

    case = harness.Case("a", torch.float32, {}, read_bytes=10_000, written_bytes=10_000)
    timing = Timing(median_us=1.0, fastest_us=1.0, slowest_us=1.0)
    record = harness.record_of("an_op", case, {"fasttps": timing}, {"read": Limit()})
    assert (record["gb_per_s"], record["share_of_read_bandwidth"]) == (20.0, 1.0)
