"""Contestants on one model at one precision, measured in turn, round after round."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttps.bench import Gauge
from peers import peer_class
from peers.peer import Job
from peers.venv import Venv
from peers.worker import Worker, WorkerError, worker_environment

OURS = "fasttps"
CHECKS, CHECK_TOKENS = 8, 32  # short prompts whose next token all peers should agree on
Say = Callable[[str], None]


@dataclass(frozen=True)
class Measure:
    """`kind` "prefill": a prompt of `tokens`; "decode": tokens after a context of `tokens`."""

    kind: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens}"


@dataclass(frozen=True)
class Plan:
    """What is measured, how often, and how.

    Attributes:
        decode_tokens: of one sample of decode.
        rounds, prefill_rounds: samples of each contestant.
        together: rivals whose models are in memory at once, beside ours.
    """

    measures: tuple[Measure, ...]
    decode_tokens: int
    rounds: int
    prefill_rounds: int
    threads: int
    together: int
    cache: Path
    passive: bool
    compile_prefill: bool

    def rounds_of(self, measure: Measure) -> int:
        return self.prefill_rounds if measure.kind == "prefill" else self.rounds

    def max_seq_len(self) -> int:
        """Tokens of the longest sequence; a peer that cannot cut its own drifts past a context."""
        return max(m.tokens for m in self.measures) + (self.rounds + 2) * self.decode_tokens


@dataclass(frozen=True)
class Model:
    """One of the shared models: its name, its folder, and the GGUF file that it came in."""

    name: str
    folder: Path
    gguf: Path | None = None

    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    def max_positions(self) -> int:
        """Longer sequences are not measured."""
        return self.config()["max_position_embeddings"]

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        """The same random token ids for all; the first few, which mean something, left out."""
        vocab_size = self.config()["vocab_size"]
        draw = random.Random(seed)
        return [draw.randrange(300, vocab_size) for _ in range(tokens)]


@dataclass
class Contestant:
    """One peer in one of its ways, and what was found out about it.

    Attributes:
        where: module and class of the peer.
        reason: why it is not measured, or no further; None where all went well.
        facts: what its worker said when it loaded.
        first_tokens: those after the check prompts.
        samples: tokens/s of each round; `beside`: ours in the same rounds; `reads`: GB/s of reading
            by each loop of the ruler in them.
        contexts: tokens in the cache at the middle of each decode sample.
        tokens: that came in the first sample of each measure.
    """

    name: str
    way: str
    where: str
    bits: str
    reason: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    first_tokens: list[int] = field(default_factory=list)
    samples: dict[Measure, list[float]] = field(default_factory=dict)
    beside: dict[Measure, list[float]] = field(default_factory=dict)
    reads: dict[Measure, list[dict[str, float]]] = field(default_factory=dict)
    contexts: dict[Measure, list[float]] = field(default_factory=dict)
    tokens: dict[Measure, list[int]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name} {self.way}".strip()

    def start(self, plan: Plan) -> Worker:
        peer = peer_class(self.where)
        venv = Venv(plan.cache, self.name, peer.install)
        logs = plan.cache / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return Worker(
            self.where,
            venv.python if peer.own_venv else sys.executable,
            plan.threads,
            worker_environment(peer.own_venv, plan.passive),
            logs / f"{self.name}-{self.way}-{self.bits}.log",
        )

    def job(self, model: Model, plan: Plan) -> Job:
        return Job(
            model.folder,
            self.bits,
            self.way,
            plan.threads,
            plan.max_seq_len(),
            2 * plan.decode_tokens,
            plan.compile_prefill,
            model.gguf,
        )


def prepare(contestants: Sequence[Contestant], model: Model, plan: Plan, say: Say) -> None:
    """Let every peer make its own files of the model, in a process that ends with that."""
    done = set()
    for each in contestants:
        if each.reason is not None or each.name in done:
            continue
        say(f"{model.name} {each.bits}: files of {each.name}")
        try:
            with each.start(plan) as worker:
                worker.ask({"do": "prepare", "job": each.job(model, plan).message()})
            done.add(each.name)
        except WorkerError as error:
            each.reason = f"its files could not be made: {error}"


def run(
    contestants: Sequence[Contestant], model: Model, plan: Plan, read: Gauge, say: Say
) -> Iterator[tuple[Contestant, Measure]]:
    """Measure everybody who has no reason not to be, in groups beside ours.

    read: sampled in every round of decode.

    Yields:
        A rival and a measure when all its samples are there; ours grow until the end.
    """
    ready = [each for each in contestants if each.reason is None]
    ours = [each for each in ready if each.name == OURS]
    rivals = [each for each in ready if each.name != OURS]
    groups = [rivals[at : at + plan.together] for at in range(0, len(rivals), plan.together)]
    with ExitStack() as stack:
        beside = [(each, load(each, model, plan, stack, say)) for each in ours]
        for group in groups or [[]]:
            with ExitStack() as group_stack:
                pairs = [(each, load(each, model, plan, group_stack, say)) for each in group]
                for measure in plan.measures:
                    say(f"{model.name}: {measure}, {', '.join(e.title for e in (*ours, *group))}")
                    turns([*beside, *pairs], measure, model, plan, read)
                    yield from ((each, measure) for each in group if each.samples.get(measure))


def load(each: Contestant, model: Model, plan: Plan, stack: ExitStack, say: Say) -> Worker | None:
    """A worker with the model loaded, closed with the stack; None, and a reason, if it fails."""
    say(f"{model.name} {each.bits}: loading {each.title}")
    try:
        worker = stack.enter_context(each.start(plan))
        each.facts = worker.ask({"do": "load", "job": each.job(model, plan).message()})
        for seed in range(1, CHECKS + 1):
            order = {"do": "prefill", "ids": model.prompt(CHECK_TOKENS, seed)}
            each.first_tokens.append(worker.ask(order)["token"])
    except WorkerError as error:
        each.reason = str(error)
        return None
    return worker


def turns(
    pairs: Sequence[tuple[Contestant, Worker | None]],
    measure: Measure,
    model: Model,
    plan: Plan,
    read: Gauge,
) -> None:
    """All rounds of one measure: every contestant once a round, the memory before them."""
    taken: list[tuple[Contestant, list[float]]] = [(each, []) for each, _ in pairs]
    ours: list[float] = []
    reads: list[dict[str, float]] = []
    for _ in range(plan.rounds_of(measure)):
        if measure.kind == "decode":
            read.sample()
            reads.append(read.latest())
        for (each, worker), (_, samples) in zip(pairs, taken):
            if worker is None or each.reason is not None:
                continue
            try:
                samples.append(sample(each, worker, measure, model, plan))
            except WorkerError as error:
                each.reason = f"{measure}: {error}"
            else:
                if each.name == OURS:
                    ours.append(samples[-1])
    for each, samples in taken:
        each.samples.setdefault(measure, []).extend(samples)
        each.beside.setdefault(measure, []).extend(ours)
        each.reads.setdefault(measure, []).extend(reads)


def sample(each: Contestant, worker: Worker, measure: Measure, model: Model, plan: Plan) -> float:
    """Tokens per second of one turn."""
    ids = model.prompt(measure.tokens)
    if measure.kind == "prefill":
        reply = worker.ask({"do": "prefill", "ids": ids})
        each.tokens.setdefault(measure, [reply["token"]])
        return measure.tokens / reply["seconds"]
    context = worker.ask({"do": "go_to", "ids": ids})["length"]
    reply = worker.ask({"do": "decode", "count": plan.decode_tokens})
    each.contexts.setdefault(measure, []).append(context + plan.decode_tokens / 2)
    each.tokens.setdefault(measure, reply["tokens"])
    return plan.decode_tokens / reply["seconds"]
