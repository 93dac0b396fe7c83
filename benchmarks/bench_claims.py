"""What FastTPS claims, on this machine, against HuggingFace eager with a cache that concatenates.

Attention: one token of one layer, RoPE and the new key and value included, over the contexts of
the paper's Figure 6. MLP: one token, as Figure 7. Model: four layers, final norm and head, greedy
tokens after a context, and over contexts. Both times of a curve are straight lines, since each
cached row is read once a token; they are fitted, and drawn with `--plot`. Beside each ratio stands
the one that the bytes allow: the time of eager over the time in which the bytes that ours must read
can be read, in the same run.
"""

from __future__ import annotations

import argparse
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import harness
import models
import plots
import shapes
import torch
import torch.nn.functional as F
from fitting import curve_fits, show_curve_fits
from rich.console import Console
from rich.table import Table

import fasttps
from fasttps.bench import Gauge, Ruler, Timing
from fasttps.bench.limits import MOST_OF_A_LIMIT
from fasttps.ops import PackedFormat

os.environ.setdefault("HF_HUB_OFFLINE", "1")

EAGER = "eager"
CONTEXT = 4096
SHAPES = (shapes.PHI_3_MINI, shapes.LLAMA_2_7B, shapes.LLAMA_3_8B)
VOCAB_SIZES = {"phi-3-mini": 32064, "llama-2-7b": 32000, "llama-3-8b": 128256}
NUM_LAYERS = 4
NEW_TOKENS = 8  # of one sample of a model
WEIGHTS = ("bf16", "int4")
GROUP = 32  # columns that share a scale of int4

# What this project holds itself to; of other models, a share of what the bytes allow.
WANTED_ATTENTION = {"phi-3-mini": 10.0, "llama-2-7b": 10.0, "llama-3-8b": 30.0}
WANTED_MODEL = {("phi-3-mini", "bf16"): 2.7, ("phi-3-mini", "int4"): 6.0}
WANTED_SHARE = 0.85
MET = {True: "met", False: "missed"}


@dataclass(frozen=True)
class Claim:
    """Ours against eager, once.

    Attributes:
        part: one of PARTS.
        read_bytes: what ours must read in one call.
        footprint_bytes: of all the data that the calls in turn read.
        wanted: the ratio aimed at; None: none, or of a model a share of what the bytes allow.
    """

    part: str
    shape: str
    weights: str
    context: int
    calls: Mapping[str, Callable[[], object]]
    read_bytes: int
    footprint_bytes: int
    wanted: float | None = None


def judged(claim: Claim, ruler: Ruler, rounds: int) -> dict[str, Any]:
    """Time both in turn, and the memory among them."""
    read = ruler.read(claim.footprint_bytes)
    timings = harness.measure(claim.calls, rounds=rounds, limits=(read,))
    return record_of(claim, timings, read)


def record_of(claim: Claim, timings: Mapping[str, Timing], read: Gauge) -> dict[str, Any]:
    ours, eager = timings[harness.OURS].median_us, timings[EAGER].median_us
    least_us = claim.read_bytes / read.rate / 1e3
    ratio, allowed = eager / ours, eager / least_us
    wanted = claim.wanted
    if wanted is None and claim.part == "model":
        wanted = WANTED_SHARE * allowed
    record = {
        "benchmark": "claims",
        "part": claim.part,
        "shape": claim.shape,
        "weights": claim.weights,
        "context": claim.context,
        "fasttps_us": round(ours, 1),
        "eager_us": round(eager, 1),
        "ratio": round(ratio, 2),
        "reduction": round(1 - ours / eager, 4),
        "ratio_the_bytes_allow": round(allowed, 2),
        "share_of_allowed": round(ratio / allowed, 3),
        "wanted_ratio": None if wanted is None else round(wanted, 2),
        "met": None if wanted is None else ratio >= wanted,
        "read_bytes": claim.read_bytes,
        "read_gb_per_s": round(read.rate, 2),
        "rounds": timings[harness.OURS].rounds,
        "eager_rounds": timings[EAGER].rounds,
    }
    if record["share_of_allowed"] > MOST_OF_A_LIMIT:
        share = f"{record['share_of_allowed']} of what the bytes allow"
        name = " ".join(filter(None, (claim.part, claim.shape, claim.weights)))
        record["broken_ruler"] = f"{name}, context {claim.context}: {share}"
    return record


def attention_calls(model: shapes.ModelShape, context: int) -> dict[str, Callable[[], object]]:
    """One layer whose cache holds `context` tokens before the new one."""
    from transformers import DynamicCache
    from transformers.models.llama.modeling_llama import (
        apply_rotary_pos_emb,
        eager_attention_forward,
    )

    dtype = torch.bfloat16
    cos, sin = shapes.cos_sin(torch.tensor([context]), model.head_dim, dtype)
    query = torch.randn(1, 1, model.num_heads, model.head_dim).to(dtype)
    key = torch.randn(1, 1, model.num_kv_heads, model.head_dim).to(dtype)
    value = torch.randn_like(key)
    slots = (1, model.num_kv_heads, context + 1, model.head_dim)
    k_cache, v_cache = (shapes.random_kv_cache(slots, dtype) for _ in range(2))
    seq_lens = torch.tensor(context)
    groups = model.num_heads // model.num_kv_heads
    module: Any = SimpleNamespace(num_key_value_groups=groups, training=False)
    cache = DynamicCache()
    cache.update(k_cache[:, :, :context], v_cache[:, :, :context], 0)

    def eager() -> torch.Tensor:
        q, k = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        keys, values = cache.update(k, value.transpose(1, 2), 0)
        out, _ = eager_attention_forward(
            module, q, keys, values, attention_mask=None, scaling=model.head_dim**-0.5
        )
        cache.crop(-1)
        return out

    return {
        harness.OURS: lambda: fasttps.ops.rope_attention_decode(
            query, key, value, k_cache, v_cache, seq_lens, cos, sin
        ),
        EAGER: eager,
    }


def attention_claim(part: str, model: shapes.ModelShape, context: int) -> Claim:
    cache_bytes = 2 * model.num_kv_heads * context * model.head_dim * 2
    copies = harness.copies_beyond_cache(cache_bytes, limit_bytes=512 << 20)
    layers = [attention_calls(model, context) for _ in range(copies)]
    return Claim(
        part,
        model.name,
        "",
        context,
        {name: harness.rotate([layer[name] for layer in layers]) for name in layers[0]},
        cache_bytes,
        cache_bytes * copies,
        WANTED_ATTENTION.get(model.name) if part == "attention" else None,
    )


def mlp_calls(model: shapes.ModelShape, weights: str) -> dict[str, Callable[[], object]]:
    hidden, inner = model.hidden_size, model.intermediate_size
    gate, up = (torch.randn(inner, hidden).mul_(hidden**-0.5).bfloat16() for _ in range(2))
    down = torch.randn(hidden, inner).mul_(inner**-0.5).bfloat16()
    x = torch.randn(1, 1, hidden).bfloat16()
    packing: dict[str, Any] = {"format": PackedFormat[weights.upper()]}
    grouped = {"group_size": GROUP} if weights == "int4" else {}
    gate_up = fasttps.ops.pack_gate_up(gate, up, **packing, **grouped)
    packed_down = fasttps.ops.pack_weight(down, **packing, **grouped)
    options: dict[str, Any] = {f"{part}_format": packing["format"] for part in ("gate_up", "down")}
    if grouped:
        options |= {f"{part}_group_size": GROUP for part in ("gate_up", "down")}
        options |= {"int8_activation": True}
    return {
        harness.OURS: lambda: fasttps.ops.gate_up_silu_mlp(
            x, gate_up, packed_down, intermediate_size=inner, **options
        ),
        EAGER: lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
    }


def mlp_claim(model: shapes.ModelShape, weights: str) -> Claim:
    count = 3 * model.hidden_size * model.intermediate_size
    read_bytes = 2 * count if weights == "bf16" else count // 2 + 2 * count // GROUP
    copies = harness.copies_beyond_cache(read_bytes, limit_bytes=512 << 20)
    layers = [mlp_calls(model, weights) for _ in range(copies)]
    calls = {name: harness.rotate([layer[name] for layer in layers]) for name in layers[0]}
    return Claim("mlp", model.name, weights, 0, calls, read_bytes, read_bytes * copies)


def filled(cache: Any, config: Any, context: int) -> Any:
    """The cache, with random keys and values: as fast as real ones, and there at once."""
    size = (1, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(size).bfloat16(), torch.randn(size).bfloat16(), layer)
    return cache


def eager_token(model: Any, context: int) -> Callable[[], float]:
    """A call that decodes greedily after a context; it gives the microseconds of a token."""
    from transformers import DynamicCache

    model.set_attn_implementation("eager")
    cache = filled(DynamicCache(config=model.config), model.config, context)
    # The argument's name changed in transformers 5.24.
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    options: dict[str, Any] = {named: cache, "use_cache": True, "logits_to_keep": 1}

    def call() -> float:
        token = torch.ones(1, 1, dtype=torch.int64)
        begin = time.perf_counter()
        for _ in range(NEW_TOKENS):
            token = model(token, **options).logits[:, -1].argmax(-1, keepdim=True)
        seconds = time.perf_counter() - begin
        cache.crop(-NEW_TOKENS)
        return seconds / NEW_TOKENS * 1e6

    return call


def our_token(model: Any, context: int) -> Callable[[], float]:
    """As `eager_token`: between the first new token and the last lie NEW_TOKENS steps."""
    room = context + NEW_TOKENS + 2
    cache = filled(fasttps.StaticKVCache(model.config, room), model.config, context)
    prompt = torch.ones(1, context + 1, dtype=torch.int64)

    def call() -> float:
        done = fasttps.generate(
            model, prompt, max_new_tokens=NEW_TOKENS + 1, stop_token_ids=(), cache=cache
        )
        cache.crop(-NEW_TOKENS - 1)
        return done.decode_s / NEW_TOKENS * 1e6

    return call


def model_claims(
    part: str, shape: shapes.ModelShape, contexts: Sequence[int], ruler: Ruler, rounds: int
) -> Iterator[dict[str, Any]]:
    """All precisions of ours in turn with one eager model; times of one token."""
    random = models.RandomLlama(shape, NUM_LAYERS, VOCAB_SIZES.get(shape.name, 4096))
    eager = random.make(torch.bfloat16)
    ours = {weights: random.make(torch.bfloat16) for weights in WEIGHTS}
    for weights, model in ours.items():
        fasttps.patch(model, weights)
    for context in contexts:
        yield from model_claims_at(part, shape, context, eager, ours, ruler, rounds)


def model_claims_at(
    part: str,
    shape: shapes.ModelShape,
    context: int,
    eager: Any,
    ours: Mapping[str, Any],
    ruler: Ruler,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    calls = {EAGER: eager_token(eager, context)}
    token_bytes = {}
    for weights, model in ours.items():
        calls[weights] = our_token(model, context)
        row_bytes = 2 * NUM_LAYERS * shape.num_kv_heads * shape.head_dim * 2
        token_bytes[weights] = models.weight_bytes(model) + context * row_bytes
    read = ruler.read(max(token_bytes.values()))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        read.sample()
        for name, call in calls.items():
            samples[name].append(call())
    timings = {name: Timing.of(taken) for name, taken in samples.items()}
    for weights, read_bytes in token_bytes.items():
        wanted = WANTED_MODEL.get((shape.name, weights)) if part == "model" else None
        claim = Claim(part, shape.name, weights, context, {}, read_bytes, read_bytes, wanted)
        both = {harness.OURS: timings[weights], EAGER: timings[EAGER]}
        yield record_of(claim, both, read)


def records(quick: bool, parts: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    ruler = Ruler(quick=quick)
    some = (shapes.SMOLLM2_135M,) if quick else SHAPES
    context = 256 if quick else CONTEXT
    if "attention" in parts:
        for shape in some:
            yield judged(attention_claim("attention", shape, context), ruler, rounds)
    curve_shape = shapes.SMOLLM2_135M if quick else shapes.LLAMA_2_7B
    contexts = (64, 128, 192) if quick else (128, 256, 512, 1024, 2048, 4096, 8192)
    if "curve" in parts:
        for each in contexts:
            yield judged(attention_claim("curve", curve_shape, each), ruler, rounds)
    if "mlp" in parts:
        for shape in some if quick else (shapes.LLAMA_3_2_1B, *some):
            for weights in WEIGHTS:
                yield judged(mlp_claim(shape, weights), ruler, rounds)
    if "model" in parts:
        for shape in some:
            yield from model_claims("model", shape, (context,), ruler, min(rounds, 9))
    if "model-curve" in parts:
        yield from model_claims("model-curve", curve_shape, contexts, ruler, min(rounds, 5))


CURVES = ("curve", "model-curve")
PARTS = {
    "attention": "attention of one token",
    "curve": "attention over the context (the paper's Figure 6)",
    "mlp": "MLP of one token (Figure 7)",
    "model": f"{NUM_LAYERS} layers and the head, one token",
    "model-curve": f"{NUM_LAYERS} layers and the head over the context",
}


def show(title: str, rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table(title=title)
    for head in ("shape", "weights", "context"):
        table.add_column(head)
    for head in ("fasttps µs", "eager µs", "less", "x", "bytes allow", "wanted"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row["shape"],
            row["weights"] or "bf16 cache",
            str(row["context"] or ""),
            f"{row['fasttps_us']:,.0f}",
            f"{row['eager_us']:,.0f}",
            f"{row['reduction']:.0%}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_the_bytes_allow']:.2f}",
            "" if row["met"] is None else f"{row['wanted_ratio']:.2f} {MET[row['met']]}",
        )
    console.print(table)


@torch.inference_mode()
def main() -> None:
    options = harness.parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    plots.add_option(options)
    chosen = options.parse_args()
    plots.check_option(options, chosen.plot)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    rounds = chosen.rounds or (3 if chosen.quick else 15)
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = harness.FILE_WIDTH
    facts = harness.environment()
    torch.manual_seed(0)
    found = []
    for record in records(chosen.quick, chosen.parts, rounds):
        found.append(record | facts)
        harness.write_json(chosen.json, found[-1:])
    for part in chosen.parts:
        show(PARTS[part], [record for record in found if record["part"] == part], console)
    lines = curve_fits(found, CURVES)
    if lines:
        show_curve_fits(lines, console)
        harness.write_json(chosen.json, [line | facts for line in lines])
    line = f"{facts['machine']} · isa {facts['isa']} · {facts['threads']} threads"
    console.print(f"{line} · commit {facts['commit']}")
    if chosen.plot:
        plots.claims(found, lines, chosen.plot, line)
    wrong = [record["broken_ruler"] for record in found if "broken_ruler" in record]
    harness.broken_ruler(wrong, chosen.quick, console)


if __name__ == "__main__":
    main()
