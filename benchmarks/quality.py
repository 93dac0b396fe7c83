"""What quantising costs: a real model's next-token distribution against that of its bf16 weights.

Teacher-forced on a text of our own (quality_text.txt): for every position the Kullback-Leibler
divergence from the reference, in nats, and whether the likeliest token is the same. The reference
is the model with its weights rounded to bf16 and all arithmetic in float32.

SmolLM2's GGUF holds 4-bit weights, on which a second rounding to 4 bits could cost nothing. So
every column that enters a layer's matrices is scaled first by a seeded factor, and what comes
before it (a norm's gain, the rows of v or up) by the inverse: the same function, other weights.
Beside ours stand llama.cpp's Q4_0, Q4_1 and Q8_0 of the same weights, dequantised and multiplied
in float32, which is more exact than llama.cpp's own arithmetic.

    python benchmarks/quality.py --json quality.jsonl
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import models
import torch
from harness import environment
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fasttps

TEXT = Path(__file__).with_name("quality_text.txt")
TOKENS_PER_CALL = 256
SPREAD = 0.35  # columns are scaled by e^u with u uniform in [-0.35, 0.35]
MAX_INT8_KL = 6e-3


@dataclass(frozen=True)
class Way:
    """One way to run the model: `make` gives it and the cache that it takes."""

    name: str
    weights: str
    group_size: int | None
    bits_per_weight: float
    activations: str
    kv: str
    make: Callable[[], Any]


@dataclass(frozen=True)
class Measured:
    """Over all positions: KL from the reference in nats, the share of equal top tokens."""

    tokens: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1: float
    perplexity: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path, default=Path("smollm2"), help="(smollm2)")
    options.add_argument("--dtype", choices=list(models.DTYPES), default="bfloat16")
    options.add_argument("--seed", type=int, default=0, help="of the scales (0)")
    options.add_argument("--spread", type=float, default=SPREAD, help=f"of the scales ({SPREAD})")
    options.add_argument("--tokens", type=int, default=10**9, help="of the text (all)")
    options.add_argument("--only", default="", help="ways whose name holds this")
    options.add_argument("--json", type=Path, help="append a line for each way")
    asked = options.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)

    model, tokenizer = models.read(asked.model, torch.float32)
    scale_columns(model, asked.seed, asked.spread)
    with torch.inference_mode():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    ids = tokenizer(TEXT.read_text(), return_tensors="pt")["input_ids"][:, : asked.tokens]
    reference = torch.cat(list(log_probabilities(model, None, ids)))
    records = []
    for way in ways(model, models.DTYPES[asked.dtype]):
        if asked.only not in way.name:
            continue
        measured = compare(reference, log_probabilities(*way.make(), ids), ids)
        facts = {key: value for key, value in vars(way).items() if key != "make"}
        records.append({"benchmark": "quality", "model": asked.model.name, **facts})
        records[-1] |= asdict(measured)
        console.print(f"{way.name}: mean KL {measured.mean_kl:.2e}", highlight=False)
        if asked.json is not None:
            with asked.json.open("a") as file:
                file.write(json.dumps(records[-1] | environment()) + "\n")
    show(records, console)
    broken = list(verdicts(records))
    for line in broken:
        console.print(line, style="red")
    raise SystemExit(1 if broken else 0)


def ways(model: Any, dtype: torch.dtype) -> Iterator[Way]:
    """The formats of `fasttps.patch`, then llama.cpp's."""
    cols = model.config.hidden_size
    bits = {"bf16": 16.0, "int8": 8 + 32 / cols}
    kinds: list[tuple[str, int | None]] = [("bf16", None), ("int8", 0), ("int8", 32)]
    kinds += [("int4", group_size) for group_size in (32, 64, 128)]
    for weights, group_size in kinds:
        for int8_activation in (False, True) if weights != "bf16" else (False,):
            for kv in ("bf16", "int8"):
                name = f"{weights} g{group_size}" if group_size else weights
                activations = "int8" if int8_activation else str(dtype).removeprefix("torch.")
                yield Way(
                    f"{name}, {activations} activations, {kv} kv",
                    weights,
                    group_size,
                    int(weights[3:]) + 16 / group_size if group_size else bits[weights],
                    activations,
                    kv,
                    patched(model, dtype, weights, group_size, int8_activation, kv),
                )
    for name, bits_per_weight in (("Q4_0", 4.5), ("Q4_1", 5.0), ("Q8_0", 8.5)):
        way = f"llama.cpp {name}, float32 activations and kv"
        yield Way(way, name, 32, bits_per_weight, "float32", "float32", requantised(model, name))


def patched(
    model: Any,
    dtype: torch.dtype,
    weights: str,
    group_size: int | None,
    int8_activation: bool,
    kv: str,
) -> Callable[[], Any]:
    def make() -> tuple[Any, Any]:
        ours = copy.deepcopy(model).to(dtype)
        options: dict[str, Any] = {"kv": kv if kv == "int8" else None}
        if weights != "bf16":
            options |= {"group_size": group_size, "int8_activation": int8_activation}
        fasttps.patch(ours, weights=weights, **options)
        return ours, fasttps.StaticKVCache

    return make


def requantised(model: Any, type_name: str) -> Callable[[], Any]:
    def make() -> tuple[Any, None]:
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType[type_name]
        theirs = copy.deepcopy(model)
        with torch.inference_mode():
            for weight in theirs.parameters():
                if weight.dim() == 2:
                    blocks = quants.quantize(weight.numpy(), kind)
                    weight.copy_(torch.from_numpy(quants.dequantize(blocks, kind)))
        return theirs, None

    return make


@torch.no_grad()
def scale_columns(model: Any, seed: int, spread: float) -> None:
    """Scale the columns of every layer's matrices, and what comes before them by the inverse."""
    generator = torch.Generator().manual_seed(seed)
    heads = model.config.num_attention_heads // model.config.num_key_value_heads
    head_dim = model.config.head_dim

    def factors(count: int) -> Tensor:
        return torch.exp(spread * (2 * torch.rand(count, generator=generator) - 1))

    def after_norm(norm: nn.Module, *linears: nn.Linear) -> None:
        by = factors(norm.weight.numel())
        norm.weight.div_(by)
        for linear in linears:
            linear.weight.mul_(by)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        after_norm(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        after_norm(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
        by = factors(mlp.up_proj.out_features)
        mlp.up_proj.weight.div_(by[:, None])
        mlp.down_proj.weight.mul_(by)
        by = factors(attention.v_proj.out_features)
        attention.v_proj.weight.div_(by[:, None])
        shared = by.view(-1, 1, head_dim).expand(-1, heads, -1)  # a kv head's query heads
        attention.o_proj.weight.mul_(shared.reshape(-1))


@torch.inference_mode()
def log_probabilities(model: Any, cache_class: Any, ids: Tensor) -> Iterator[Tensor]:
    """Log-probabilities [some tokens, vocabulary] in float32, piece after piece of the text."""
    from transformers import DynamicCache

    if cache_class is None:
        cache = DynamicCache(config=model.config)
    else:
        cache = cache_class.for_model(model, ids.shape[1])
    # The argument's name changed in transformers 5.24.
    accepted = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in accepted else "past_key_values"
    for piece in ids.split(TOKENS_PER_CALL, dim=1):
        logits = model(piece, **{name: cache}, use_cache=True).logits[0]
        yield logits.float().log_softmax(-1)


@torch.inference_mode()
def compare(reference: Tensor, pieces: Iterator[Tensor], ids: Tensor) -> Measured:
    divergences, same, losses, at = [], [], [], 0
    for piece in pieces:
        exact = reference[at : at + piece.size(0)]
        divergences.append((exact.exp() * (exact - piece)).sum(-1, dtype=torch.float64))
        same.append(exact.argmax(-1) == piece.argmax(-1))
        following = ids[0, at + 1 : at + 1 + piece.size(0)]
        losses.append(-piece[: following.numel()].gather(1, following[:, None])[:, 0])
        at += piece.size(0)
    divergence = torch.cat(divergences)
    return Measured(
        tokens=divergence.numel(),
        mean_kl=float(divergence.mean()),
        p99_kl=float(divergence.quantile(0.99)),
        max_kl=float(divergence.max()),
        top1=float(torch.cat(same).double().mean()),
        perplexity=float(torch.cat(losses).double().mean().exp()),
    )


def show(records: list[dict[str, Any]], console: Console) -> None:
    if not records:
        return
    first = records[0]
    table = Table(title=f"{first['model']}, {first['tokens']} tokens, against bf16 weights")
    for column in ("weights", "bits", "activations", "kv"):
        table.add_column(column)
    for column in ("mean KL", "99 % KL", "top-1", "perplexity"):
        table.add_column(column, justify="right")
    for record in records:
        group = f" g{record['group_size']}" if record["group_size"] else ""
        table.add_row(
            record["weights"] + group,
            f"{record['bits_per_weight']:.2f}",
            record["activations"],
            record["kv"],
            f"{record['mean_kl']:.2e}",
            f"{record['p99_kl']:.2e}",
            f"{record['top1']:.2%}",
            f"{record['perplexity']:.3f}",
        )
    console.print(table)


def verdicts(records: list[dict[str, Any]]) -> Iterator[str]:
    """What falls short of the promise, in groups of 32 with bf16 caches.

    int8 stays below a fixed KL, int4 is no worse than llama.cpp's Q4_0.
    """
    theirs = [record["mean_kl"] for record in records if record["weights"] == "Q4_0"]
    limits = {"int8": MAX_INT8_KL, "int4": min(theirs, default=math.inf)}
    for record in records:
        limit = limits.get(record["weights"], math.inf)
        judged = record["group_size"] == 32 and record["kv"] == "bf16"
        if judged and record["mean_kl"] > limit:
            yield f"{record['name']}: mean KL {record['mean_kl']:.2e} is above {limit:.2e}"


if __name__ == "__main__":
    main()
