"""The comparison of peers runs, with a peer of our own in the place of the installed ones."""

from __future__ import annotations

import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import process_environment

pytest.importorskip("transformers", reason="transformers is not installed")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

FAKE = """
import os
import statistics
import time

from peers.peer import Peer, SteppingPeer


class Fake(SteppingPeer):
    bits = ("bf16",)
    ways = ("steady", "failing", "dying")
    own_venv = False

    def load(self, job):
        print("libraries print what they like")
        self.way = job.way
        return {"version": "fake 1", "weight_bytes": 2 * job.weights(), "note": str(os.getpid())}

    def keep(self, length):
        self.length = length

    def extend(self, ids):
        self.length += len(ids)
        time.sleep(1e-3 * len(ids))
        if len(ids) == 1 and self.way == "failing":
            raise ArithmeticError("no more")
        if len(ids) == 1 and self.way == "dying":
            os.abort()
        return self.length
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    (folder / "fake_peer.py").write_text(FAKE)
    file = folder / "peers.jsonl"
    environment = process_environment()
    paths = [str(folder), environment.get("PYTHONPATH", "")]
    command = [sys.executable, BENCHMARKS / "bench_peers.py", "--quick", "--bits", "bf16"]
    peers = ["--peers", "fake=fake_peer:Fake", "llama.cpp", "--no-install"]
    size = ["--prefill", "16", "--contexts", "8", "24", "--decode-tokens", "4", "--rounds", "2"]
    done = subprocess.run(
        [*command, *peers, *size, "--cache", folder / "cache", "--json", file],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in file.read_text().splitlines()]


def of(records, peer, way=""):
    return [r for r in records if r["peer"] == peer and way in (r["way"], "")]


def test_every_measure_has_a_figure_of_ours_and_of_the_peer(records):
    wanted = [("prefill", 16), ("decode", 8), ("decode", 24)]
    for peer, way in (("fasttps", ""), ("fake", "steady")):
        got = [(r["measure"], r["tokens"]) for r in of(records, peer, way)]
        assert got == wanted
    for ours, record in zip(of(records, "fasttps"), of(records, "fake", "steady")):
        rounds = zip(ours["samples"], record["samples"])
        ratio = statistics.median(one / other for one, other in rounds)
        assert record["fasttps_over_peer"] == pytest.approx(ratio, rel=0.01, abs=1e-3)
        assert record["tokens_per_s"] < 1e4  # its sleep is in the time


def test_bytes_are_weights_and_cache(records):
    # Of the tiny shape: 2 layers, hidden 256, intermediate 512, 4 heads and 2 KV heads of 64.
    weights = 2 * (256 * 64 * 12 + 3 * 256 * 512) + 4096 * 256
    for record in of(records, "fake", "steady")[1:]:
        assert record["weight_bytes"] == 2 * weights
        assert record["context"] == record["tokens"] + 2
        assert record["bytes_per_token"] == 2 * weights + record["context"] * 2 * 2 * 2 * 64 * 2
        assert record["share_of_read_bandwidth"] > 0


def test_who_fails_is_listed_with_the_reason(records):
    reasons = {(r["peer"], r["way"]): r["reason"] for r in records if "reason" in r}
    assert set(reasons) == {("llama.cpp", "native"), ("fake", "failing"), ("fake", "dying")}
    assert reasons["llama.cpp", "native"] == "not installed"
    assert "ArithmeticError: no more" in reasons["fake", "failing"]
    assert f"ended with code {-signal.SIGABRT}" in reasons["fake", "dying"]
    # What was measured before is kept.
    assert [r["measure"] for r in of(records, "fake", "failing") if "measure" in r] == ["prefill"]


def test_no_worker_is_left(records):
    for record in of(records, "fake", "steady"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(record["note"]), 0)


def test_an_interrupted_run_keeps_what_it_measured(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_peers")
    contest, files = bench.contest, bench.model_files
    (tmp_path / "config.json").write_text(json.dumps(files.SHAPES["tiny"].config()))
    facts = {"weight_bytes": 1 << 40, "kv_bytes_per_token": 0}

    class Worker:
        def ask(self, message):
            if message["do"] == "go_to" and len(message["ids"]) > 8:
                raise KeyboardInterrupt
            return {
                "seconds": 0.5,
                "token": 7,
                "tokens": [7],
                "length": len(message.get("ids", [])),
            }

    def load(each, *_):
        each.facts, each.first_tokens = facts, [1, 2]
        return Worker()

    monkeypatch.setattr(bench, "model_of", lambda *_: contest.Model("tiny", tmp_path))
    monkeypatch.setattr(contest, "prepare", lambda *_: None)
    monkeypatch.setattr(contest, "load", load)
    file = tmp_path / "peers.jsonl"
    size = ["--prefill", "16", "--contexts", "8", "24", "--rounds", "2", "--decode-tokens", "1"]
    what = ["--quick", "--bits", "bf16", "--peers", "transformers/eager-dynamic"]
    options = [*what, *size, "--json", str(file), "--cache", str(tmp_path)]
    monkeypatch.setattr(bench, "install", lambda *_, **__: {})
    with pytest.raises(KeyboardInterrupt):
        bench.main(options)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    wanted = [(peer, n) for peer in ("transformers", "fasttps") for n in (16, 8)]
    assert [(r["peer"], r["tokens"]) for r in records] == wanted
    assert records[0]["fasttps_over_peer"] == 1
    assert all(r["reference"] == "transformers eager-dynamic bf16" for r in records)
    # A TiB in half a second: such a figure is marked.
    assert ["broken_ruler" in r for r in records] == [False, True, False, True]
