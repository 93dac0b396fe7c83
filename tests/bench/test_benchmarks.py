"""The project's own benchmarks run with --quick, and hold their work against the ruler."""

from __future__ import annotations

import importlib
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
    return imported("harness")


def imported(name: str) -> ModuleType:
    """A file of benchmarks/, which imports those beside it."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


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
    timing = Timing(median_us=1.0, fastest_us=1.0, slowest_us=1.0, rounds=3)  # 10 GB/s
    record = harness.record_of("an_op", case, {"fasttps": timing}, {"read": Limit()})
    assert record["share_of_read_bandwidth"] == 1.0
    faster = Timing(median_us=0.9, fastest_us=0.9, slowest_us=0.9, rounds=3)
    with pytest.raises(BrokenRulerError, match="an_op, a shape runs at 11"):
        harness.record_of("an_op", case, {"fasttps": faster}, {"read": Limit()})
    record = harness.record_of("an_op", case, {"fasttps": faster}, {"read": Limit()}, strict=False)
    assert record["share_of_read_bandwidth"] == pytest.approx(1.1111)
    assert "broken ruler: an_op" in record["broken_ruler"]


def test_a_run_in_which_the_ruler_broke_keeps_its_records_and_fails(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Limit:
        rate, best = 1e-9, "none"

        def sample(self) -> None:
            pass

    monkeypatch.setattr(harness.Ruler, "read", lambda self, footprint_bytes: Limit())

    def cases(quick: bool) -> Any:
        for name in ("a", "b", "c"):
            calls = {"fasttps": lambda: None, "other": lambda: None}
            yield harness.Case(name, torch.float32, calls, read_bytes=64 if name == "a" else 0)

    file = tmp_path / "records.jsonl"
    options = ["--rounds", "1", "--json", str(file)]
    with pytest.raises(SystemExit, match=r"broken ruler.*\n.*an_op, a runs at"):
        harness.main("an_op", cases, options)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["shape"] for record in records] == ["a", "b", "c"]
    assert ["broken_ruler" in record for record in records] == [True, False, False]
    assert [record["rounds"] for record in records] == [3, 1, 1]
    harness.main("an_op", cases, [*options, "--quick", "--only", "b"])
    assert json.loads(file.read_text().splitlines()[-1])["shape"] == "b"


def test_written_bytes_count_for_no_share(harness: ModuleType) -> None:
    class Limit:
        rate, best = 10.0, "avx2 x1"

    case = harness.Case("a", torch.float32, {}, read_bytes=10_000, written_bytes=10_000)
    timing = Timing(median_us=1.0, fastest_us=1.0, slowest_us=1.0, rounds=3)
    record = harness.record_of("an_op", case, {"fasttps": timing}, {"read": Limit()})
    assert (record["gb_per_s"], record["share_of_read_bandwidth"]) == (20.0, 1.0)


def test_peers_are_compared_round_by_round() -> None:
    """A machine that slows down between two rounds changes no share and no ratio."""
    contest, report = imported("peers.contest"), imported("peers.report")
    decode = contest.Measure("decode", 128)

    def contestant(name: str, samples: list[float]) -> Any:
        return contest.Contestant(
            name,
            "",
            "",
            "bf16",
            facts={"weight_bytes": 10**9, "kv_bytes_per_token": 0},
            samples={decode: samples},
            beside={decode: [45.0, 46.0, 72.0, 71.0]},
            reads={decode: [{"a loop": rate} for rate in (50.0, 50.0, 80.0, 80.0)]},
            contexts={decode: [128.0]},
            tokens={decode: []},
        )

    model = contest.Model("a-model", Path())
    ours = report.record_of(contestant("fasttps", [45.0, 46.0, 72.0, 71.0]), decode, model, None)
    assert ours["share_of_read_bandwidth"] == pytest.approx(0.9)
    peer = report.record_of(contestant("a-peer", [30.0, 30.7, 48.0, 47.0]), decode, model, None)
    assert peer["fasttps_over_peer"] == pytest.approx(1.5, abs=0.01)
    faster = report.record_of(contestant("fasttps", [55.0] * 4), decode, model, None)
    assert "broken_ruler" not in faster
    faster = report.record_of(contestant("fasttps", [55.0, 55.0, 88.0, 88.0]), decode, model, None)
    assert faster["broken_ruler"].startswith("110%")


def test_a_straight_line_is_found_and_a_bent_one_told() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    scaling = imported("bench_scaling")
    contexts = [1 << 10, 1 << 13, 1 << 17]
    line = scaling.fit(contexts, [5.0 + 0.25 * x for x in contexts], 1)
    assert line.coefficients == pytest.approx((5.0, 0.25))
    assert line.r_squared == pytest.approx(1.0)
    squares = [float(x * x) for x in (1, 2, 3, 4, 5, 6)]
    assert scaling.fit([1, 2, 3, 4, 5, 6], squares, 1).r_squared < 0.97
    square = scaling.fit([1, 2, 3, 4, 5, 6], squares, 2)
    assert square.coefficients == pytest.approx((0.0, 0.0, 1.0), abs=1e-9)
    # 2048 bytes a token, 0.1 µs a token: 20.48 GB/s.
    series = scaling.Series("attention-context", "", "", {}, work=2048, unit="GB/s")
    medians = {x: 3 + 0.1 * x for x in (10, 20, 30)}
    fastest = {x: 3 + 0.05 * x for x in (10, 20, 30)}
    record = scaling.record_of(series, medians, fastest, None)
    assert (record["slope"], record["as_theory_says"]) == (20.48, True)
    assert (record["fastest_slope"], record["fastest_r_squared"]) == (40.96, 1.0)


def test_scaling(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    picture = tmp_path / "scaling.png"
    can_draw = importlib.util.find_spec("matplotlib") is not None
    options = ["--plot", str(picture)] if can_draw else []
    parts = ("attention-context", "attention-prefill", "model-batch")
    file = tmp_path / "scaling.jsonl"
    records = run("bench_scaling", file, "--parts", *parts, *options)
    assert {record["part"] for record in records} == set(parts)
    assert all(len(record["x"]) == len(record["us"]) == 3 for record in records)
    assert all(record["r_squared"] <= 1 and record["machine"] for record in records)
    assert picture.exists() == can_draw
