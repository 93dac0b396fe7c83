"""A whole model: `generate` patched and unpatched, with the caches that a person would choose.

All ways answer in turn, round after round, with the same weights and prompt; the figures are
medians over the rounds. Prefill: prompt tokens over the time to the first token. Decode: the
tokens after it over theirs, everything that `generate` does between two tokens included.
Counted bytes: all weights and the keys and values so far, once a token.
"""

from __future__ import annotations

import copy
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
from transformers import StoppingCriteria, StoppingCriteriaList

import fasttps
from fasttps.bench import Gauge, share_of_limit

UNPATCHED = "unpatched_dynamic"


class Clock(StoppingCriteria):
    """Notes when each token is there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@dataclass
class Way:
    """One way to answer: a model, and the options that choose its cache, made anew each time."""

    title: str
    model: Any
    cache: Callable[[], dict[str, Any]]
    prefill: list[float] = field(default_factory=list)  # tokens/s of each round
    decode: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of the last answer

    def answer(self, prompt: torch.Tensor, new_tokens: int) -> None:
        clock = Clock()
        begin = time.perf_counter()
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([clock]),
            **self.cache(),
        )
        self.prefill.append(prompt.shape[1] / (clock.times[0] - begin))
        self.decode.append((new_tokens - 1) / (clock.times[-1] - clock.times[0]))
        self.tokens = output[0, prompt.shape[1] :].tolist()


def ways_of(model: Any, max_seq_len: int) -> dict[str, Way]:
    """The ways, over two models of the same weights: `model` itself and a patched copy."""
    patched = copy.deepcopy(model)
    fasttps.patch(patched)
    hf_static = {"cache_implementation": "static", "disable_compile": True}

    def own_cache() -> dict[str, Any]:
        return {"past_key_values": fasttps.StaticKVCache(model.config, max_seq_len)}

    return {
        UNPATCHED: Way("sdpa, dynamic", model, dict),
        "unpatched_static": Way("sdpa, static", model, lambda: hf_static),
        "patched_dynamic": Way("fasttps, dynamic", patched, dict),
        "patched_hf_static": Way("fasttps, static", patched, lambda: hf_static),
        "patched_static_kv": Way("fasttps, StaticKVCache", patched, own_cache),
    }


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


def record_of(
    name: str,
    dtype: str,
    ways: dict[str, Way],
    prompt_tokens: int,
    new_tokens: int,
    token_bytes: int,
    read: Gauge,
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "benchmark": "generate",
        "model": name,
        "dtype": dtype,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "bytes_per_token": token_bytes,
        "read_gb_per_s": round(read.rate, 2),
        "read_loop": read.best,
    }
    base = statistics.median(ways[UNPATCHED].decode)
    for key, way in ways.items():
        decode = statistics.median(way.decode)
        share = share_of_limit(f"{name}, {way.title}", decode * token_bytes / 1e9, read.rate)
        record |= {
            f"{key}_prefill_tokens_per_s": round(statistics.median(way.prefill), 2),
            f"{key}_decode_tokens_per_s": round(decode, 2),
            f"{key}_decode_over_unpatched": round(decode / base, 3),
            f"{key}_share_of_read_bandwidth": round(share, 3),
            f"{key}_agreeing_tokens": agreeing_tokens(way.tokens, ways[UNPATCHED].tokens),
        }
    return record


def show(record: dict[str, Any], ways: dict[str, Way], console: Console) -> None:
    new_tokens = record["new_tokens"]
    table = Table(
        title=f"{record['model']}, {record['dtype']}, prompt {record['prompt_tokens']}, "
        f"{new_tokens} new tokens"
    )
    table.add_column("", no_wrap=True)
    heads = ("prefill tok/s", "decode tok/s", "(x)", "of read", "same")
    for head in heads:
        table.add_column(head, justify="right")
    for key, way in ways.items():
        table.add_row(
            way.title,
            f"{record[f'{key}_prefill_tokens_per_s']:,.1f}",
            f"{record[f'{key}_decode_tokens_per_s']:,.1f}",
            f"{record[f'{key}_decode_over_unpatched']:.2f}",
            f"{record[f'{key}_share_of_read_bandwidth']:.0%}",
            f"{record[f'{key}_agreeing_tokens']}/{new_tokens}",
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
    console = Console()
    with fasttps.isa.forced(chosen.isa) if chosen.isa else nullcontext(), torch.inference_mode():
        model = models.make(chosen.model, shape, models.DTYPES[chosen.dtype])
        ways = ways_of(model, prompt_tokens + new_tokens)
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(1, model.config.vocab_size, (1, prompt_tokens), generator=generator)
        for way in ways.values():
            way.answer(prompt, min(4, new_tokens))  # warm-up, not counted
            way.prefill, way.decode = [], []
        token_bytes = bytes_per_token(model, chosen.dtype, prompt_tokens + new_tokens // 2)
        read = harness.Ruler(quick=quick).read(token_bytes)
        for _ in range(chosen.rounds or (3 if quick else 7)):
            read.sample()
            for way in ways.values():
                way.answer(prompt, new_tokens)
        name = models.name_of(chosen.model, shape)
        record = record_of(name, chosen.dtype, ways, prompt_tokens, new_tokens, token_bytes, read)
        record |= harness.environment()
    show(record, ways, console)
    console.print(
        f"{record['machine']} · isa {record['isa']} · {record['threads']} threads · "
        f"read {record['read_gb_per_s']:.1f} GB/s · commit {record['commit']}"
    )
    harness.write_json(chosen.json, [record])


if __name__ == "__main__":
    main()
