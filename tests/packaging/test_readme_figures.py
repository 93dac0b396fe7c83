"""README's tables of figures, against the kept runs that they are from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
QUALITY = {
    "bf16": "bf16, bfloat16 activations, bf16 kv",
    "int8, groups of 32": "int8 g32, int8 activations, bf16 kv",
    "int4, groups of 32": "int4 g32, int8 activations, bf16 kv",
    "Q4_0 of llama.cpp": "llama.cpp Q4_0, float32 activations and kv",
}


def kept(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def cells(*first: str, more: int) -> list[str]:
    """The cells after the first ones of the table row that begins with them and has `more`."""
    begin = "| " + " | ".join(first) + " |"
    lines = (ROOT / "README.md").read_text().splitlines()
    rows = [line.split("|")[1 + len(first) : -1] for line in lines if line.startswith(begin)]
    (row,) = [row for row in rows if len(row) == more]
    return [cell.strip() for cell in row]


@pytest.mark.parametrize("row", QUALITY)
def test_what_rounding_costs(row):
    run = {record["name"]: record for record in kept("quality")}[QUALITY[row]]
    bits, divergence, same = cells(row, more=3)
    assert float(bits) == pytest.approx(run["bits_per_weight"], abs=0.01)
    decimals = len(divergence.partition(".")[2])
    assert divergence == f"{run['mean_kl']:.{decimals}f}"
    assert same == f"{100 * run['top1']:.1f} %"


@pytest.mark.parametrize("context", [128, 2048, 8192])
@pytest.mark.parametrize("bits", ["bf16", "int8", "int4"])
def test_how_fast(bits, context):
    wanted = {"measure": "decode", "bits": bits, "tokens": context, "threads": 2}
    runs = [r for r in kept("peers-llama-3.2-1b") if all(r.get(k) == wanted[k] for k in wanted)]
    latest = {run["peer"]: run for run in runs}
    ours = latest["fasttps"]
    assert cells(bits, f"{context:,}", more=4) == [
        f"{ours['tokens_per_s']:.1f}",
        f"{100 * ours['share_of_read_bandwidth']:.0f} %",
        f"{latest['ik_llama.cpp']['fasttps_over_peer']:.2f} x",
        f"{latest['openvino']['fasttps_over_peer']:.2f} x",
    ]


def sentence(begin: str) -> str:
    """README's words from there to the end of the paragraph, on one line."""
    text = " ".join((ROOT / "README.md").read_text().split())
    return text[text.index(begin) :].partition(" ###")[0]


def test_families():
    text = sentence("A few layers of real models of these families")
    for weights, words in (
        ("bf16", "{} to {} times as many tokens/s in bf16"),
        ("int4", "{} to {} times with int4"),
    ):
        ratios = [
            r["decode_over_transformers"]
            for r in kept("families")
            if (r["attention"], r["weights"]) == ("fasttps", weights)
        ]
        assert len(ratios) == 13
        assert words.format(f"{min(ratios):.1f}", f"{max(ratios):.1f}") in text


def test_loading_of_gguf_files():
    runs = [r for r in kept("load_gguf") if r["model"] == "random"]
    assert {r["blocks"] for r in runs} == {"Q4_0", "Q8_0", "Q4_K", "Q6_K"}
    rates = [r["of_dd"] for r in runs]
    wanted = f"loads at {min(rates):.2f} to {max(rates):.2f} of the rate at which `dd` reads it"
    assert wanted in sentence("SmolLM2's file is ready")
