"""Ours and everyone else's, on the same weights, in the same run.

Each peer has a virtual environment of its own under the cache folder, made on the first run, and a
worker process that is stopped while others run. In every round each peer has one turn; figures are
medians over the rounds, and every ratio is to ours in the same rounds. Nothing else should run.

Prefill: prompt tokens over the time to the first new token. Decode: greedy tokens, one at a time,
after a context. Bytes of a token: all matrices as that peer stores them, and the keys and values so
far; their share of the read bandwidth is of that in the same rounds. Peers of one table have
weights of the same bits; what else they choose is in the notes of the JSON lines. A peer that
cannot run here is listed with its reason. A run that is ended by Ctrl-C or SIGTERM keeps what it
has measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from peers import PEERS, contest, model_files, peer_class, report
from peers.install import default_cache, install
from peers.worker import worker_environment
from rich.console import Console

from fasttps.bench import Ruler

BITS = {"bf16": 16, "int8": 8, "int4": 4, "file": 5}  # about so many a weight
PEER_FORMS = "PEER/WAY: one way of it; NAME=MODULE:CLASS: one of your own; ours is always there"
USUAL = {
    "models": ["llama-3.2-1b"],
    "bits": ["bf16", "int8", "int4"],
    "prefill": [512, 4096],
    "contexts": [128, 2048, 8192],
    "decode_tokens": 16,
    "rounds": 5,
    "prefill_rounds": 3,
}
QUICK = {
    "models": ["tiny"],
    "bits": ["bf16", "int8", "int4"],
    "prefill": [64],
    "contexts": [32, 128],
    "decode_tokens": 4,
    "rounds": 2,
    "prefill_rounds": 1,
}
REFERENCE = "transformers"  # its first way at bf16 says which tokens are right


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    models = ", ".join(model_files.NAMES)
    peers = ", ".join(PEERS)
    add("--quick", action="store_true", help="a tiny model, short prompts, few rounds")
    add("--models", nargs="+", choices=model_files.NAMES, metavar="MODEL", help=f"of {models} (*)")
    add("--bits", nargs="+", choices=BITS, help="of weights; file: the model's GGUF file's (*)")
    add("--peers", nargs="+", metavar="PEER", help=f"of {peers} (all); {PEER_FORMS}")
    add("--prefill", nargs="*", type=int, metavar="TOKENS", help="lengths of prompts (*)")
    add("--contexts", nargs="*", type=int, metavar="TOKENS", help="before the decoded tokens (*)")
    add("--decode-tokens", type=int, help="of one sample (*)")
    add("--rounds", type=int, help="samples of decode (*)")
    add("--prefill-rounds", type=int, help="samples of prefill (*)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(%(default)s)")
    add("--together", type=int, help="rivals in memory at once, beside ours (as many as fit)")
    add("--compile-prefill", action="store_true", help="compile each length of prompt too: minutes")
    add("--passive", action="store_true", help="OMP_WAIT_POLICY=passive, for a machine in use")
    add("--no-install", action="store_true", help="list what is not installed as not measured")
    add("--prepare-only", action="store_true", help="install, write model files, measure nothing")
    add("--cache", type=Path, default=default_cache(), help="(%(default)s)")
    add("--json", type=Path, help="append one line of JSON a figure to this file")
    chosen = options.parse_args(arguments)
    for name, value in (QUICK if chosen.quick else USUAL).items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)
    chosen.peers = chosen.peers or list(PEERS)
    known = {name.partition("/")[0] for name in chosen.peers if "=" not in name}
    if known - set(PEERS):
        options.error(f"--peers wanted {peers}, got {', '.join(sorted(known - set(PEERS)))}")
    return chosen


def contestants_of(names: Sequence[str], bits: str) -> list[contest.Contestant]:
    """Ours, then everyone chosen, in each of their ways that has such weights."""
    found = []
    for name in dict.fromkeys([contest.OURS, *names]):
        name, _, where = name.partition("=")
        name, _, only = name.partition("/")
        where = where or PEERS[name]
        peer = peer_class(where)
        ways = [way for way in peer.ways if only in ("", way)]
        if not ways:
            raise SystemExit(f"--peers: {name} wanted a way of {', '.join(peer.ways)}, got {only}")
        if bits in peer.bits:
            found += [contest.Contestant(name, way, where, bits) for way in ways]
    return found


def model_of(name: str, cache: Path, console: Console) -> contest.Model:
    """The shared folder, made by a process of its own if it is not there."""
    folder = cache / "models" / name
    gguf = model_files.smollm2_gguf() if name == model_files.SMOLLM2 else None
    if not model_files.stamp(folder).exists():
        with console.status(f"writing {folder}"):
            subprocess.run(
                [sys.executable, "-m", "peers.model_files", name, folder],
                env=worker_environment(own_venv=False, passive=True),
                stdout=subprocess.DEVNULL,
                check=True,
            )
    return contest.Model(name, folder, gguf)


def rivals_that_fit(model: contest.Model) -> int:
    """How many models fit in free memory beside ours, at twice the bf16 weights each."""
    weights = sum(file.stat().st_size for file in model.folder.glob("*.safetensors"))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    return max(1, int(free // (2 * weights + (1 << 30))) - 1)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    console = Console(soft_wrap=True, log_path=False)
    if not console.is_terminal:
        console.width = 200
    cache = options.cache.resolve()
    torch.set_num_threads(options.threads)
    names = options.peers
    installed = [name.partition("/")[0] for name in names if "=" not in name]
    reasons = install(cache, installed, console, make=not options.no_install)
    kinds = [("prefill", sorted(options.prefill)), ("decode", sorted(options.contexts))]
    measures = tuple(contest.Measure(kind, n) for kind, lengths in kinds for n in lengths)
    ruler = Ruler(quick=options.quick)
    records: list[dict[str, Any]] = []
    for model_name in options.models:
        model = model_of(model_name, cache, console)
        plan = contest.Plan(
            tuple(measure for measure in measures if measure.tokens < model.max_positions()),
            options.decode_tokens,
            options.rounds,
            options.prefill_rounds,
            options.threads,
            options.together or rivals_that_fit(model),
            cache,
            options.passive,
            options.compile_prefill,
        )
        reference = None
        for bits in options.bits:
            found = contestants_of(names, bits)
            for each in found:
                each.reason = reasons.get(each.name)
            contest.prepare(found, model, plan, console.log)
            if options.prepare_only:
                continue
            weights = found[0].job(model, plan).weights()
            read = ruler.read(weights * BITS[bits] // 8, options.threads)
            kept = Kept(model, {"threads": options.threads}, options.json, reference)
            try:
                for each, measure in contest.run(found, model, plan, read, console.log):
                    kept.figure(found, each, measure)
            finally:
                kept.rest(found)
                title = f"{model.name}, {bits}, {options.threads} threads"
                report.show(title, kept.records, console)
                records += kept.records
            reference = kept.reference
    facts = harness.environment()
    console.print(f"{facts['machine']} · isa {facts['isa']} · commit {facts['commit']}")
    harness.broken_ruler(report.broken(records), options.quick, console)


class Kept:
    """The records of one model at one precision, each written when it is there.

    Attributes:
        reference: whose tokens the others are compared with; of bf16, or of an earlier precision.
    """

    def __init__(
        self,
        model: contest.Model,
        facts: dict[str, Any],
        file: Path | None,
        reference: contest.Contestant | None,
    ) -> None:
        self.model, self.file, self.reference = model, file, reference
        self.facts = harness.environment() | facts
        self.records: list[dict[str, Any]] = []
        self._done: set[tuple[str, str, contest.Measure]] = set()

    def figure(
        self,
        found: Sequence[contest.Contestant],
        each: contest.Contestant,
        measure: contest.Measure,
    ) -> None:
        self._done.add((each.name, each.way, measure))
        if each.bits == "bf16":
            self.reference = self.reference or reference_of(found)
        self._keep(report.record_of(each, measure, self.model, self.reference))

    def rest(self, found: Sequence[contest.Contestant]) -> None:
        """What was not written yet: ours, and why others were not measured."""
        for each in found:
            for measure, samples in each.samples.items():
                if samples and (each.name, each.way, measure) not in self._done:
                    self.figure(found, each, measure)
            if each.reason is not None:
                self._keep(report.reason_of(each, self.model))

    def _keep(self, record: dict[str, Any]) -> None:
        self.records.append(record | self.facts)
        harness.write_json(self.file, self.records[-1:])


def reference_of(contestants: Sequence[contest.Contestant]) -> contest.Contestant | None:
    """Whose tokens the others are compared with."""
    able = [each for each in contestants if each.first_tokens]
    return min(able, key=lambda each: each.name != REFERENCE, default=None)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
