"""`fasttps bench` measures a short selection and leaves records that can be read alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fasttps.bench import selection
from fasttps.cli.errors import ExitCode
from tests.support.command import run_process


def test_bench_with_a_given_model(llama_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    ran = run_process("bench", "--quick", "--model", llama_folder, "--threads", "1", "--json", file)
    assert ran.code == ExitCode.OK, ran.err
    for title in ("what this machine can do at most", "ops", f"{llama_folder.name}: 32 tokens"):
        assert title in ran.out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(r["machine"] and r["isa"] and r["torch"] and r["threads"] == 1 for r in records)
    assert [r for r in records if "limit" in r and r["unit"] == "GB/s"]
    ops = {r["op"]: r for r in records if "op" in r}
    names = {"rope_attention_decode", "packed_linear", "gate_up_silu_mlp", "causal_prefill"}
    assert set(ops) == names
    assert ops["packed_linear"]["share_of_read_bandwidth"] > 0
    (model,) = [r for r in records if "model" in r]
    assert model["fasttps_decode_tokens_per_s"] > 0
    assert model["transformers_decode_tokens_per_s"] > 0


def test_a_model_that_is_not_there_is_told_before_anything_is_measured() -> None:
    ran = run_process("bench", "--quick", "--model", "nowhere")
    assert (ran.code, ran.out) == (ExitCode.BROKEN_MODEL, "")


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(run) -> None:
    ran = run("bench", "--quick", "--json", "nowhere/at/all")
    assert (ran.code, ran.out) == (ExitCode.USAGE, "")
    assert "--json nowhere/at/all: No such file" in ran.error_line


@pytest.mark.parametrize("quick", [True, False])
def test_ours_and_theirs_compute_the_same(quick: bool) -> None:
    for case in (
        selection.op_cases(True) if quick else [selection.linear(selection.SMOLLM2_135M, 3)]
    ):
        ours, theirs = (call() for call in case.calls.values())
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        if "attention" in case.shape or "prefill" in case.shape:
            theirs = theirs.transpose(1, 2)
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)
