"""A whole model: `generate` of transformers unpatched and patched, and `fasttps.generate`.

Unpatched: eager and sdpa attention with the cache that grows, transformers' own default. Patched:
exact, int8 and int4 weights, each by transformers' `generate` and by `fasttps.generate`, with a
cache of `Patch.cache`. All ways answer in turn, round after round, with the same weights and
prompt; the figures are medians over the rounds. Prefill: prompt tokens over the time to the first
token. Decode: the tokens after it over theirs, everything that `generate` does between two tokens
included. Counted bytes: all weights as they lie, and the keys and values so far, once a token.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import harness
import models
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

import fasttps
from fasttps.bench import Gauge
from fasttps.bench.limits import MOST_OF_A_LIMIT

# The argument's name changed in transformers 5.24.
NAMES = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in NAMES else "past_key_values"
EXACT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
QUANTISED = ("int8", "int4")
EAGER, SDPA = "eager", "sdpa"
HF, OUR_LOOP = "transformers", "fasttps"  # whose generate
WANTED_OVER_EAGER = {"bf16": 3.0, "int8": 5.0}  # of a model as small as SmolLM2, by HF's generate
SMALL_BYTES = 300 << 20


class Clock(StoppingCriteria):
    """Notes when each token is there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@dataclass
class Way:
    """One way to answer: a model, and whose `generate` is called.

    Attributes:
        weights: as they lie.
        cache: makes one, anew for each answer; None: what `generate` makes.
        prefill, decode: tokens/s of each round.
        tokens: of the last answer.
    """

    attention: str
    weights: str
    loop: str
    model: Any
    cache: Callable[[], Any] | None = None
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.loop}.generate, {self.attention} {self.weights}"

    def answer(self, prompt: torch.Tensor, new_tokens: int) -> None:
        by = self.by_transformers if self.loop == HF else self.by_fasttps
        prefill_s, decode_s, self.tokens = by(prompt, new_tokens)
        self.prefill.append(prompt.shape[1] / prefill_s)
        self.decode.append((new_tokens - 1) / decode_s)

    def by_transformers(
        self, prompt: torch.Tensor, new_tokens: int
    ) -> tuple[float, float, list[int]]:
        clock = Clock()
        begin = time.perf_counter()
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([clock]),
            **({CACHE: self.cache()} if self.cache else {}),
        )
        tokens = output[0, prompt.shape[1] :].tolist()
        return clock.times[0] - begin, clock.times[-1] - clock.times[0], tokens

    def by_fasttps(self, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float, list[int]]:
        cache = self.cache() if self.cache else None
        done = fasttps.generate(
            self.model, prompt, max_new_tokens=new_tokens, stop_token_ids=(), cache=cache
        )
        return done.prefill_s, done.decode_s, done.token_ids[0]


def ways_of(model: Any, dtype: str, max_seq_len: int) -> list[Way]:
    """The ways, over copies of `model`, which is the sdpa one; no answer ends early."""
    model.generation_config.eos_token_id = None
    model.set_attn_implementation(SDPA)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation(EAGER)
    exact = EXACT[dtype]
    ways = [Way(EAGER, exact, HF, eager), Way(SDPA, exact, HF, model)]
    for weights in (exact, *QUANTISED):
        patched = copy.deepcopy(model)
        patch = fasttps.patch(patched, None if weights == exact else weights)

        def cache(patch: Any = patch) -> Any:
            return patch.cache(max_seq_len)

        ways += [Way("fasttps", weights, loop, patched, cache) for loop in (HF, OUR_LOOP)]
    return ways


def agreeing_tokens(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two answers share before they part."""
    pairs = enumerate(zip(ours, theirs))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def bytes_per_token(model: Any, dtype: str, context: int) -> int:
    """Weights, and the keys and values of `context` tokens."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row_bytes = 2 * config.num_key_value_heads * head_dim * models.DTYPES[dtype].itemsize
    return models.weight_bytes(model) + config.num_hidden_layers * context * row_bytes


def records_of(
    name: str, dtype: str, ways: Sequence[Way], prompt_tokens: int, new_tokens: int, read: Gauge
) -> list[dict[str, Any]]:
    eager, sdpa = (statistics.median(way.decode) for way in ways[:2])
    small = dtype == "bfloat16" and models.weight_bytes(ways[1].model) < SMALL_BYTES
    records = []
    for way in ways:
        decode = statistics.median(way.decode)
        token_bytes = bytes_per_token(way.model, dtype, prompt_tokens + new_tokens // 2)
        share = decode * token_bytes / 1e9 / read.rate
        judged = small and (way.attention, way.loop) == ("fasttps", HF)
        wanted = WANTED_OVER_EAGER.get(way.weights) if judged else None
        record = {
            "benchmark": "generate",
            "model": name,
            "dtype": dtype,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "attention": way.attention,
            "weights": way.weights,
            "generate": way.loop,
            "prefill_tokens_per_s": round(statistics.median(way.prefill), 2),
            "decode_tokens_per_s": round(decode, 2),
            "samples": [round(value, 2) for value in way.decode],
            "decode_over_eager": round(decode / eager, 3),
            "decode_over_sdpa": round(decode / sdpa, 3),
            "wanted_over_eager": wanted,
            "met": None if wanted is None else decode / eager >= wanted,
            "bytes_per_token": token_bytes,
            "read_gb_per_s": round(read.rate, 2),
            "read_loop": read.best,
            "share_of_read_bandwidth": round(share, 3),
            "agreeing_tokens": agreeing_tokens(way.tokens, ways[0].tokens),
        }
        if share > MOST_OF_A_LIMIT:
            record["broken_ruler"] = f"{name}, {way.title}: {share:.3f} of the read bandwidth"
        records.append(record)
    return records


def show(records: Sequence[dict[str, Any]], ways: Sequence[Way], console: Console) -> None:
    first = records[0]
    table = Table(
        title=f"{first['model']}, {first['dtype']}, prompt {first['prompt_tokens']}, "
        f"{first['new_tokens']} new tokens"
    )
    table.add_column("", no_wrap=True)
    for head in ("prefill tok/s", "decode tok/s", "x eager", "x sdpa", "of read", "same"):
        table.add_column(head, justify="right")
    table.add_column("wanted")
    for record, way in zip(records, ways):
        met = {None: "", True: "met", False: "missed"}[record["met"]]
        table.add_row(
            way.title,
            f"{record['prefill_tokens_per_s']:,.1f}",
            f"{record['decode_tokens_per_s']:,.1f}",
            f"{record['decode_over_eager']:.2f}",
            f"{record['decode_over_sdpa']:.2f}",
            f"{record['share_of_read_bandwidth']:.0%}",
            f"{record['agreeing_tokens']}/{record['new_tokens']}",
            met and f"{record['wanted_over_eager']:g} x eager: {met}",
        )
    console.print(table)


def main() -> None:
    options = harness.parser(__doc__ or "")
    models.add_options(options)
    options.add_argument("--prompt-tokens", type=int, help="(128; 32 with --quick)")
    options.add_argument("--new-tokens", type=int, help="(64; 16 with --quick)")
    chosen = options.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    quick = chosen.quick
    prompt_tokens = chosen.prompt_tokens or (32 if quick else 128)
    new_tokens = chosen.new_tokens or (16 if quick else 64)
    shape = chosen.shape or ("tiny" if quick else "smollm2-135m")
    name = models.name_of(chosen.model, shape)
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = harness.FILE_WIDTH
    with fasttps.isa.forced(chosen.isa) if chosen.isa else nullcontext(), torch.inference_mode():
        facts = harness.environment()
        model = models.make(chosen.model, shape, models.DTYPES[chosen.dtype])
        ways = ways_of(model, chosen.dtype, prompt_tokens + new_tokens)
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(1, model.config.vocab_size, (1, prompt_tokens), generator=generator)
        for way in ways:
            way.answer(prompt, min(4, new_tokens))  # warm-up, not counted
            way.prefill, way.decode = [], []
        token_bytes = bytes_per_token(model, chosen.dtype, prompt_tokens + new_tokens // 2)
        read = harness.Ruler(quick=quick).read(token_bytes)
        for _ in range(chosen.rounds or (3 if quick else 7)):
            read.sample()
            for way in ways:
                way.answer(prompt, new_tokens)
        found = records_of(name, chosen.dtype, ways, prompt_tokens, new_tokens, read)
    records = [record | facts for record in found]
    show(records, ways, console)
    console.print(
        f"{facts['machine']} · isa {facts['isa']} · {facts['threads']} threads · "
        f"read {read.rate:.1f} GB/s · commit {facts['commit']}"
    )
    harness.write_json(chosen.json, records)
    wrong = [record["broken_ruler"] for record in records if "broken_ruler" in record]
    harness.broken_ruler(wrong, quick, console)


if __name__ == "__main__":
    main()
