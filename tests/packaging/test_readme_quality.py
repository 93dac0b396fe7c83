"""README's table of what rounding costs, against the kept run of benchmarks/quality.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = {
    "bf16": "bf16, bfloat16 activations, bf16 kv",
    "int8, groups of 32": "int8 g32, int8 activations, bf16 kv",
    "int4, groups of 32": "int4 g32, int8 activations, bf16 kv",
    "Q4_0 of llama.cpp": "llama.cpp Q4_0, float32 activations and kv",
}


@pytest.mark.parametrize("row", ROWS)
def test_what_rounding_costs(row):
    lines = (ROOT / "benchmarks/results/quality.jsonl").read_text().splitlines()
    run = {record["name"]: record for record in map(json.loads, lines)}[ROWS[row]]
    (line,) = [
        x for x in (ROOT / "README.md").read_text().splitlines() if x.startswith(f"| {row} |")
    ]
    bits, divergence, same = (cell.strip() for cell in line.split("|")[2:5])
    assert float(bits) == pytest.approx(run["bits_per_weight"], abs=0.01)
    decimals = len(divergence.partition(".")[2])
    assert divergence == f"{run['mean_kl']:.{decimals}f}"
    assert same == f"{100 * run['top1']:.1f} %"
