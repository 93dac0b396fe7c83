"""The benchmark of the claims runs, and its ratios are those of its times and bytes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import process_environment

pytest.importorskip("transformers", reason="transformers is not installed")

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_claims.py"


def test_bench_claims(tmp_path):
    file = tmp_path / "claims.jsonl"
    picture = tmp_path / "claims.png"
    can_draw = importlib.util.find_spec("matplotlib") is not None
    options = ["--plot", picture] if can_draw else []
    done = subprocess.run(
        [sys.executable, BENCH, "--quick", "--rounds", "1", "--json", file, *options],
        env=process_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert picture.exists() == can_draw
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    records = [line for line in lines if not line["part"].endswith("-fit")]
    parts = {"attention", "curve", "mlp", "model", "model-curve"}
    assert {record["part"] for record in records} == parts
    fitted = [(line["part"], line["weights"], line["of"]) for line in lines[len(records) :]]
    kinds = [("curve-fit", ""), ("model-curve-fit", "bf16"), ("model-curve-fit", "int4")]
    assert fitted == [(*kind, of) for kind in kinds for of in ("eager", "fasttps")]
    assert all(line["r_squared"] <= 1 for line in lines[len(records) :])
    for record in records:
        assert record["ratio"] == pytest.approx(
            record["eager_us"] / record["fasttps_us"], rel=0.05, abs=0.01
        )
        least_us = record["read_bytes"] / record["read_gb_per_s"] / 1e3
        assert record["ratio_the_bytes_allow"] == pytest.approx(
            record["eager_us"] / least_us, rel=0.05
        )
    # SmolLM2's: 3 KV heads of 64, keys and values of bf16.
    attention = [record for record in records if record["part"] in ("attention", "curve")]
    for record in attention:
        assert record["read_bytes"] == 2 * 3 * 64 * 2 * record["context"]
