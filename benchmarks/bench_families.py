"""`generate` of every family unpatched and patched: layers of real models, a few of each.

Unpatched: what transformers chooses for the class, with the cache that grows. Patched: exact and
int4 weights with a StaticKVCache, by transformers' `generate`. The ways answer in turn, round after
round, with the same weights and prompt; figures are medians over the rounds, ratios those of one
run. A vocabulary of 32,000 is common to all, so that layers and not heads are compared.
"""

from __future__ import annotations

import copy
import importlib
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import harness
import models
import torch
from bench_generate import EXACT, HF, Way, bytes_per_token
from rich.console import Console
from rich.table import Table

import fasttps

VOCAB = 32000


@dataclass(frozen=True)
class Model:
    """Some layers of a published model: hidden size, MLP width, heads, KV heads and head dim."""

    module: str
    kind: str
    sizes: tuple[int, int, int, int, int]
    layers: int
    changes: dict[str, Any]

    def make(self, dtype: torch.dtype) -> Any:
        from transformers.initialization import no_init_weights

        hidden, width, heads, kv_heads, head_dim = self.sizes
        configs = importlib.import_module(f"transformers.models.{self.module}")
        suffix = "TextConfig" if self.kind == "Gemma3" else "Config"
        config = getattr(configs, self.kind + suffix)(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=width,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=8192,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
            **self.changes,
        )
        torch.manual_seed(0)
        with no_init_weights():
            model = getattr(configs, f"{self.kind}ForCausalLM")._from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    parameter.fill_(1)
                else:
                    parameter.uniform_(-1, 1).mul_(parameter.shape[-1] ** -0.5)
        return model.eval()


_GEMMA3 = {"sliding_window": 512, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
_LFM2 = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
MODELS = {
    "llama-3.2-1b": Model("llama", "Llama", (2048, 8192, 32, 8, 64), 4, {}),
    "mistral-7b": Model("mistral", "Mistral", (4096, 14336, 32, 8, 128), 2, {}),
    "qwen2.5-0.5b": Model("qwen2", "Qwen2", (896, 4864, 14, 2, 64), 8, {}),
    "qwen3-0.6b": Model("qwen3", "Qwen3", (1024, 3072, 16, 8, 128), 8, {}),
    "phi-3-mini": Model("phi3", "Phi3", (3072, 8192, 32, 32, 96), 4, {}),
    "gemma-2-2b": Model("gemma2", "Gemma2", (2304, 9216, 8, 4, 256), 4, {}),
    "gemma-3-1b": Model("gemma3", "Gemma3", (1152, 6912, 4, 1, 256), 6, _GEMMA3),
    "glm-4-9b": Model("glm", "Glm", (4096, 13696, 32, 2, 128), 2, {"attention_bias": True}),
    "lfm2-350m": Model("lfm2", "Lfm2", (1024, 6656, 16, 8, 64), 4, _LFM2),
    "granite-3-2b": Model("granite", "Granite", (2048, 8192, 32, 8, 64), 4, {}),
    "olmo-2-1b": Model("olmo2", "Olmo2", (2048, 8192, 16, 16, 128), 4, {}),
    "smollm3-3b": Model("smollm3", "SmolLM3", (2048, 11008, 16, 4, 128), 4, {}),
    "starcoder2-3b": Model("starcoder2", "Starcoder2", (3072, 12288, 24, 2, 128), 4, {}),
}


def ways_of(model: Any, dtype: str, max_seq_len: int) -> list[Way]:
    exact = EXACT[dtype]
    ways = [Way("transformers", exact, HF, model)]
    for weights in (exact, "int4"):
        patched = copy.deepcopy(model)
        patch = fasttps.patch(patched, None if weights == exact else weights)

        def cache(patch: Any = patch) -> Any:
            return patch.cache(max_seq_len)

        ways.append(Way("fasttps", weights, HF, patched, cache))
    return ways


def measure(name: str, chosen: Any, prompt_tokens: int, new_tokens: int) -> list[dict[str, Any]]:
    model = MODELS[name].make(models.DTYPES[chosen.dtype])
    ways = ways_of(model, chosen.dtype, prompt_tokens + new_tokens)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, VOCAB, (1, prompt_tokens), generator=generator)
    for way in ways:
        way.answer(prompt, 4)  # warm-up, not counted
        way.prefill, way.decode = [], []
    context = prompt_tokens + new_tokens // 2
    read = harness.Ruler(quick=chosen.quick).read(bytes_per_token(model, chosen.dtype, context))
    for _ in range(chosen.rounds or (2 if chosen.quick else 7)):
        read.sample()
        for way in ways:
            way.answer(prompt, new_tokens)
    theirs = ways[0]
    records = []
    for way in ways:
        decode = statistics.median(way.decode)
        token_bytes = bytes_per_token(way.model, chosen.dtype, context)
        records.append(
            {
                "benchmark": "families",
                "model": name,
                "layers": MODELS[name].layers,
                "dtype": chosen.dtype,
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
                "attention": way.attention,
                "weights": way.weights,
                "prefill_tokens_per_s": round(statistics.median(way.prefill), 2),
                "decode_tokens_per_s": round(decode, 2),
                "prefill_over_transformers": _ratio(way.prefill, theirs.prefill),
                "decode_over_transformers": _ratio(way.decode, theirs.decode),
                "bytes_per_token": token_bytes,
                "read_gb_per_s": round(read.rate, 2),
                "share_of_read_bandwidth": round(decode * token_bytes / 1e9 / read.rate, 3),
            }
        )
    return records


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over the rounds of the ratio in each."""
    return round(statistics.median(one / other for one, other in zip(ours, theirs)), 3)


def main() -> None:
    options = harness.parser(__doc__ or "")
    options.add_argument("--dtype", choices=list(models.DTYPES), default="bfloat16")
    options.add_argument("--only", choices=list(MODELS), action="append", help="(all)")
    options.add_argument("--prompt-tokens", type=int, help="(128; 16 with --quick)")
    options.add_argument("--new-tokens", type=int, help="(64; 8 with --quick)")
    chosen = options.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    prompt_tokens = chosen.prompt_tokens or (16 if chosen.quick else 128)
    new_tokens = chosen.new_tokens or (8 if chosen.quick else 64)
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = harness.FILE_WIDTH
    table = Table(title=f"{chosen.dtype}, prompt {prompt_tokens}, {new_tokens} new tokens")
    for head in ("", "prefill tok/s", "x", "decode tok/s", "x", "of read"):
        table.add_column(head, justify="right" if head else "left", no_wrap=not head)
    records: list[dict[str, Any]] = []
    with fasttps.isa.forced(chosen.isa) if chosen.isa else nullcontext(), torch.inference_mode():
        facts = harness.environment()
        for name in chosen.only or MODELS:
            records += [r | facts for r in measure(name, chosen, prompt_tokens, new_tokens)]
    for record in records:
        table.add_row(
            f"{record['model']} ({record['layers']} layers), {record['attention']} "
            f"{record['weights']}",
            f"{record['prefill_tokens_per_s']:,.1f}",
            f"{record['prefill_over_transformers']:.2f}",
            f"{record['decode_tokens_per_s']:,.1f}",
            f"{record['decode_over_transformers']:.2f}",
            f"{record['share_of_read_bandwidth']:.0%}",
        )
    console.print(table)
    harness.write_json(chosen.json, records)


if __name__ == "__main__":
    main()
