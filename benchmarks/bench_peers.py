"""Ours and everyone else's, on the same weights, in the same run.

Each peer has a virtual environment of its own under the cache folder, made on the first run, and a
worker process that is stopped while others run. In every round each peer has one turn; figures are
medians over the rounds, and every ratio is to ours in the same rounds. Nothing else should run.

Prefill: prompt tokens over the time to the first new token. Decode: greedy tokens, one at a time,
after a context. Bytes of a token: all matrices as that peer stores them, and the keys and values so
far. Peers of one table have weights of the same bits; what else they choose is in the notes of the
JSON lines. A peer that cannot run here is listed with its reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import harness
import torch
from peers import PEERS, contest, model_files, peer_class, report
from peers.install import default_cache, install
from peers.worker import BENCHMARKS
from rich.console import Console

BITS = ("bf16", "int8", "int4", "file")
REFERENCE = "transformers"  # its first way at bf16 says which tokens are right


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add(
        "--models",
        nargs="+",
        choices=model_files.NAMES,
        default=["llama-3.2-1b"],
        metavar="MODEL",
        help=f"of {', '.join(model_files.NAMES)} (llama-3.2-1b)",
    )
    add(
        "--bits",
        nargs="+",
        choices=BITS,
        default=["bf16", "int8", "int4"],
        help="weights; `file`: those of the GGUF file that a model came in (bf16 int8 int4)",
    )
    add(
        "--peers",
        nargs="+",
        metavar="PEER",
        help=f"of {', '.join(PEERS)} (all); PEER/WAY for one way of it; NAME=MODULE:CLASS for one "
        "of your own, in this environment. Ours is always there",
    )
    add("--prefill", nargs="*", type=int, default=[512, 4096], help="prompt lengths (512 4096)")
    add("--contexts", nargs="*", type=int, default=[128, 2048, 8192], help="(128 2048 8192)")
    add("--decode-tokens", type=int, default=16, help="of one sample (%(default)s)")
    add("--rounds", type=int, default=5, help="samples of decode (%(default)s)")
    add("--prefill-rounds", type=int, default=3, help="samples of prefill (%(default)s)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(%(default)s)")
    add(
        "--together",
        type=int,
        help="rivals whose models are in memory at once, beside ours (as many as fit)",
    )
    add(
        "--compile-prefill",
        action="store_true",
        help="torch.compile each prompt length too, which takes minutes each",
    )
    add("--passive", action="store_true", help="OMP_WAIT_POLICY=passive, for a machine in use")
    add("--no-install", action="store_true", help="list what is not installed as not measured")
    add(
        "--prepare-only", action="store_true", help="install and write model files, measure nothing"
    )
    add("--cache", type=Path, default=default_cache(), help="(%(default)s)")
    add("--json", type=Path, help="append one line of JSON a figure to this file")
    return options.parse_args(arguments)


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
                env=os.environ | {"PYTHONPATH": str(BENCHMARKS)},
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
    names = options.peers or list(PEERS)
    known = [name.partition("/")[0] for name in names if "=" not in name]
    unknown = set(known) - set(PEERS)
    if unknown:
        raise SystemExit(f"--peers wanted {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    reasons = install(cache, known, console, make=not options.no_install)
    kinds = [("prefill", sorted(options.prefill)), ("decode", sorted(options.contexts))]
    measures = tuple(contest.Measure(kind, n) for kind, lengths in kinds for n in lengths)
    for model_name in options.models:
        model = model_of(model_name, cache, console)
        plan = contest.Plan(
            measures,
            options.decode_tokens,
            options.rounds,
            options.prefill_rounds,
            options.threads,
            options.together or rivals_that_fit(model),
            cache,
            options.passive,
            options.compile_prefill,
            lambda: harness.read_bandwidth_gb_per_s(1 << 29, rounds=2),
        )
        reference = None
        for bits in options.bits:
            found = contestants_of(names, bits)
            for each in found:
                each.reason = reasons.get(each.name)
            contest.prepare(found, model, plan, console.log)
            if options.prepare_only:
                continue
            contest.run(found, model, plan, console.log)
            if reference is None:
                right = [each for each in found if each.first_tokens]
                right.sort(key=lambda each: each.name != REFERENCE)
                reference = right[0] if right else None
            facts = harness.environment() | {"threads": options.threads}
            records = [r | facts for r in report.records_of(found, model, reference)]
            report.show(f"{model.name}, {bits}, {options.threads} threads", records, console)
            harness.write_json(options.json, records)
    facts = harness.environment()
    console.print(f"{facts['machine']} · isa {facts['isa']} · commit {facts['commit']}")


if __name__ == "__main__":
    main()
