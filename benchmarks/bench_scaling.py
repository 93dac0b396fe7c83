"""Cost as work grows: decode against context and batch, prefill against length, fitted and plotted.

    .venv/bin/python benchmarks/bench_scaling.py --plot scaling.png --json scaling.jsonl

All sizes of a series are timed in turn. Theory says what shape a series has: decode reads the
weights once and each cached row once, so its time is a straight line over the context and over the
batch, and the slope is a speed in bytes a second; attention over a prompt multiplies each live pair
of query and key, so its time is a straight line over those pairs. What the paper's Figures 6 and 7
show, against HuggingFace eager, is in bench_claims.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bench_rope_attention_decode
import harness
import models
import plots
import shapes
import torch
from fitting import fit
from rich.console import Console
from rich.table import Table

import fasttps
from fasttps.bench import Gauge, Ruler

STRAIGHT = 0.99  # R^2 from which on a series counts as what theory says
NEW_TOKENS = 8  # of one sample of a model
DTYPE = torch.bfloat16
EVERY_PART = ("attention-context", "attention-batch", "model-context", "model-batch")
EVERY_PART += ("attention-prefill", "model-prefill")


@dataclass(frozen=True)
class Series:
    """One quantity that grows.

    Attributes:
        part: one of EVERY_PART.
        what: for the reader.
        grows: what x counts.
        calls: x to the call; its time is divided by `repeats`.
        work: of one more x: bytes read, or operations; for the slope as a speed.
        unit: of that speed: "GB/s" or "GFLOP/s"; "": the slope is no speed.
        degree: of the polynomial that theory says.
        footprint_bytes: what the ruler reads beside it; 0: nothing.
    """

    part: str
    what: str
    grows: str
    calls: Mapping[int, Callable[[], object]]
    work: float = 0.0
    unit: str = ""
    degree: int = 1
    repeats: int = 1
    footprint_bytes: int = 0


def record_of(
    series: Series, us: Mapping[int, float], fastest_us: Mapping[int, float], read: Gauge | None
) -> dict[str, Any]:
    """The fit of the medians; and of the fastest, which other programs disturb less."""
    x, y = list(us), list(us.values())
    line = fit(x, y, series.degree)
    least = fit(x, list(fastest_us.values()), series.degree)
    record: dict[str, Any] = {
        "benchmark": "scaling",
        "part": series.part,
        "what": series.what,
        "grows": series.grows,
        "x": x,
        "us": [round(value, 2) for value in y],
        "coefficients_us": list(line.coefficients),
        "r_squared": round(line.r_squared, 5),
        "as_theory_says": line.r_squared >= STRAIGHT,
        "fastest_us": [round(value, 2) for value in fastest_us.values()],
        "fastest_coefficients_us": list(least.coefficients),
        "fastest_r_squared": round(least.r_squared, 5),
    }
    for name, found in (("slope", line), ("fastest_slope", least)):
        if series.unit and found.coefficients[1] > 0:
            speed = series.work / found.coefficients[1] / 1e3  # per µs to 1e9 per s
            record |= {name: round(speed, 2), "slope_unit": series.unit}
    if read is not None:
        record |= {"read_gb_per_s": round(read.rate, 2), "read_loop": read.best}
    return record


def timed(series: Series, ruler: Ruler, rounds: int) -> dict[str, Any]:
    read = ruler.read(series.footprint_bytes) if series.footprint_bytes else None
    calls = {str(x): call for x, call in series.calls.items()}
    timings = harness.measure(calls, rounds=rounds, limits=() if read is None else (read,))
    us = {x: timings[str(x)].median_us / series.repeats for x in series.calls}
    fastest_us = {x: timings[str(x)].fastest_us / series.repeats for x in series.calls}
    return record_of(series, us, fastest_us, read)


# Attention of one layer.


def attention_over_context(model: shapes.ModelShape, contexts: Sequence[int]) -> Series:
    row_bytes = 2 * model.num_kv_heads * model.head_dim * DTYPE.itemsize

    def call(context: int) -> Callable[[], object]:
        copies = harness.copies_beyond_cache(row_bytes * context, limit_bytes=256 << 20)
        layers = [
            bench_rope_attention_decode.layer_calls(model, DTYPE, context) for _ in range(copies)
        ]
        return harness.rotate([layer[harness.OURS] for layer in layers])

    return Series(
        "attention-context",
        f"rope_attention_decode, {model.name}",
        "cached tokens",
        {context: call(context) for context in contexts},
        work=row_bytes,
        unit="GB/s",
        footprint_bytes=row_bytes * max(contexts),
    )


def attention_over_batch(model: shapes.ModelShape, context: int, batches: Sequence[int]) -> Series:
    most = max(batches)
    cos, sin = shapes.cos_sin(torch.tensor([context - 1]), model.head_dim, DTYPE)
    seq_lens = torch.tensor(context - 1)
    slots = (most, model.num_kv_heads, context, model.head_dim)
    k_cache, v_cache = (shapes.random_kv_cache(slots, DTYPE) for _ in range(2))

    def call(batch: int) -> Callable[[], object]:
        query = torch.randn(batch, 1, model.num_heads, model.head_dim).to(DTYPE)
        key = torch.randn(batch, 1, model.num_kv_heads, model.head_dim).to(DTYPE)
        value = torch.randn_like(key)
        first = 0

        def attend() -> torch.Tensor:
            nonlocal first  # other sequences each time, so that none is warm
            first = first + batch if first + 2 * batch <= most else 0
            k, v = k_cache[first : first + batch], v_cache[first : first + batch]
            return fasttps.ops.rope_attention_decode(query, key, value, k, v, seq_lens, cos, sin)

        return attend

    sequence_bytes = 2 * model.num_kv_heads * context * model.head_dim * DTYPE.itemsize
    return Series(
        "attention-batch",
        f"rope_attention_decode, {model.name}, context {context}",
        "sequences",
        {batch: call(batch) for batch in batches},
        work=sequence_bytes,
        unit="GB/s",
        footprint_bytes=sequence_bytes * most,
    )


def attention_over_prompt(model: shapes.ModelShape, lengths: Sequence[int]) -> Series:
    def call(tokens: int) -> Callable[[], object]:
        cos, sin = shapes.cos_sin(torch.arange(tokens), model.head_dim, DTYPE)
        query = torch.randn(1, tokens, model.num_heads, model.head_dim).to(DTYPE)
        key = torch.randn(1, tokens, model.num_kv_heads, model.head_dim).to(DTYPE)
        value = torch.randn_like(key)
        k_cache = torch.zeros(1, model.num_kv_heads, tokens, model.head_dim, dtype=DTYPE)
        v_cache, seq_lens = torch.zeros_like(k_cache), torch.tensor(0)
        return lambda: fasttps.ops.causal_prefill(
            query, key, value, k_cache, v_cache, seq_lens, cos, sin
        )

    return Series(
        "attention-prefill",
        f"causal_prefill, {model.name}",
        "live pairs of query and key",
        {tokens * (tokens + 1) // 2: call(tokens) for tokens in lengths},
        work=4 * model.num_heads * model.head_dim,
        unit="GFLOP/s",
    )


# A whole patched model.


def decode_call(model: Any, batch: int, context: int) -> Callable[[], object]:
    """NEW_TOKENS greedy tokens of `batch` sequences whose caches hold `context` tokens."""
    cache = fasttps.StaticKVCache(model.config, context + NEW_TOKENS + 1)
    config = model.config
    size = (batch, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(size).to(DTYPE), torch.randn(size).to(DTYPE), layer)
    prompt = torch.ones(batch, context + 1, dtype=torch.int64)

    def call() -> object:
        done = fasttps.generate(
            model, prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=(), cache=cache
        )
        cache.crop(-NEW_TOKENS)
        return done

    return call


def prefill_call(model: Any, tokens: int) -> Callable[[], object]:
    cache = fasttps.StaticKVCache(model.config, tokens + 1)
    prompt = torch.ones(1, tokens, dtype=torch.int64)

    def call() -> object:
        cache.reset()
        return fasttps.generate(model, prompt, max_new_tokens=1, stop_token_ids=(), cache=cache)

    return call


def model_series(name: str, model: Any, parts: Sequence[str], quick: bool) -> Iterator[Series]:
    config = model.config
    heads = config.num_key_value_heads
    row_bytes = 2 * config.num_hidden_layers * heads * config.head_dim * DTYPE.itemsize
    weight_bytes = models.weight_bytes(model)
    contexts = (64, 128, 256) if quick else (128, 2048, 4096, 8192, 12288, 16384)
    batches = (1, 2, 3) if quick else (1, 2, 4, 8, 12, 16)
    lengths = (16, 32, 64, 128) if quick else (64, 128, 256, 512, 1024, 2048)
    if "model-context" in parts:
        yield Series(
            "model-context",
            f"one token, {name}",
            "cached tokens",
            {context: decode_call(model, 1, context) for context in contexts},
            work=row_bytes,
            unit="GB/s",
            repeats=NEW_TOKENS,
            footprint_bytes=weight_bytes + row_bytes * max(contexts),
        )
    if "model-batch" in parts:
        context = contexts[1]
        yield Series(
            "model-batch",
            f"one token each, {name}, context {context}",
            "sequences",
            {batch: decode_call(model, batch, context) for batch in batches},
            work=row_bytes * context,
            unit="GB/s",
            repeats=NEW_TOKENS,
            footprint_bytes=weight_bytes + row_bytes * context * max(batches),
        )
    if "model-prefill" in parts:
        yield Series(
            "model-prefill",
            f"prefill, {name}",
            "tokens",
            {tokens: prefill_call(model, tokens) for tokens in lengths},
            degree=2,
        )


# All of it.


def all_series(parts: Sequence[str], quick: bool) -> Iterator[Series]:
    layer = shapes.SMOLLM2_135M if quick else shapes.LLAMA_3_2_1B
    if "attention-context" in parts:
        contexts = (128, 256, 512) if quick else (1024, 4096, 8192, 16384, 32768, 65536, 131072)
        yield attention_over_context(layer, contexts)
    if "attention-batch" in parts:
        context, batches = (128, (1, 2, 4)) if quick else (8192, (1, 2, 4, 6, 8, 12, 16))
        yield attention_over_batch(layer, context, batches)
    if "attention-prefill" in parts:
        yield attention_over_prompt(layer, (32, 64, 96) if quick else (256, 512, 1024, 2048, 4096))
    if any(part.startswith("model") for part in parts):
        name = "tiny" if quick else "llama-3.2-1b-4-layers"
        model = models.RANDOM[name].make(DTYPE)
        fasttps.patch(model)
        yield from model_series(name, model, parts, quick)


def show(records: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table(title="time as work grows: least squares")
    for head in ("what", "grows"):
        table.add_column(head)
    heads = (
        "from µs",
        "to µs",
        "at 0 µs",
        "slope",
        "read GB/s",
        "R²",
        "of the fastest",
        "as theory says",
    )
    for head in heads:
        table.add_column(head, justify="right")
    for record in records:
        slope = f"{record['slope']:,.1f} {record['slope_unit']}" if "slope" in record else ""
        table.add_row(
            record["what"],
            f"{record['grows']} {min(record['x']):,} to {max(record['x']):,}",
            f"{record['us'][0]:,.1f}",
            f"{record['us'][-1]:,.1f}",
            f"{record['coefficients_us'][0]:,.1f}",
            slope,
            f"{record['read_gb_per_s']:.1f}" if "read_gb_per_s" in record else "",
            f"{record['r_squared']:.4f}",
            f"{record['fastest_r_squared']:.4f}",
            "yes" if record["as_theory_says"] else "no",
        )
    console.print(table)


@torch.inference_mode()
def main() -> None:
    options = harness.parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--parts", nargs="+", choices=EVERY_PART, default=EVERY_PART, help="(all)")
    plots.add_option(options)
    chosen = options.parse_args()
    plots.check_option(options, chosen.plot)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    rounds = chosen.rounds or (3 if chosen.quick else 9)
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = harness.FILE_WIDTH
    ruler = Ruler(quick=chosen.quick)
    torch.manual_seed(0)
    records = []
    with fasttps.isa.forced(chosen.isa or fasttps.isa.active()):
        facts = harness.environment()
        for series in all_series(chosen.parts, chosen.quick):
            records.append(timed(series, ruler, rounds) | facts)
            harness.write_json(chosen.json, records[-1:])
            del series
    show(records, console)
    line = f"{facts['machine']} · isa {facts['isa']} · {facts['threads']} threads"
    console.print(f"{line} · commit {facts['commit']}")
    if chosen.plot:
        plots.scaling(records, chosen.plot, line)


if __name__ == "__main__":
    main()
