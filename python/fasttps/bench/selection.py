"""What `fasttps bench` measures: a short selection of limits, ops and a whole model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fasttps
from fasttps.bench import limits
from fasttps.bench.case import OURS, Case
from fasttps.bench.limits import BrokenRulerError, Ruler, share_of_limit
from fasttps.bench.machine import last_level_cache_bytes
from fasttps.bench.timing import rotate
from fasttps.ops import PackedFormat

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Shape:
    """A layer of a model that people know."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_3_2_1B = Shape("llama-3.2-1b", 2048, 8192, 32, 8, 64)
SMOLLM2_135M = Shape("smollm2-135m", 576, 1536, 9, 3, 64)


def limit_records(quick: bool) -> Iterator[dict[str, Any]]:
    """What this machine can do at most: reading from memory, multiplying, starting work."""
    threads = torch.get_num_threads()
    ruler = Ruler(quick=quick)
    for count in sorted({1, threads}):
        gauge = ruler.read(4 * last_level_cache_bytes(), count)
        rate = round(gauge.sampled(3 if quick else 9), 2)
        what = f"read memory, {gauge.best}"
        yield {"limit": what, "threads": count, "value": rate, "unit": "GB/s"}
        for instruction, peak in limits.peaks(count, 5 if quick else 25).items():
            rate = round(peak, 1)
            yield {"limit": instruction, "threads": count, "value": rate, "unit": "1e9 op/s"}
    costs = {"empty OpenMP region": limits.region_us(threads)}
    costs |= {f"{op} without work": us for op, us in limits.dispatch_us(5).items()}
    for what, us in costs.items():
        yield {"limit": what, "threads": threads, "value": round(us, 3), "unit": "µs"}


def op_cases(quick: bool) -> Iterator[Case]:
    """Each op that matters to a token or a prompt, beside what PyTorch offers."""
    shape = SMOLLM2_135M if quick else LLAMA_3_2_1B
    yield decode_attention(shape, 512 if quick else 4096)
    yield linear(shape, 1)
    yield mlp(shape, 1)
    if not quick:
        yield mlp(shape, 512)
    yield prefill_attention(shape, 128 if quick else 1024)


def _copies(bytes_each: int) -> int:
    """So many layers that the last-level cache holds none of them when its turn comes."""
    return max(1, min(-(-2 * last_level_cache_bytes() // bytes_each) + 1, (1 << 29) // bytes_each))


def _in_turn(layers: list[dict[str, Callable[[], object]]]) -> dict[str, Callable[[], object]]:
    return {name: rotate([layer[name] for layer in layers]) for name in layers[0]}


def _bf16(*sizes: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(sizes) * scale).bfloat16()


def _attention(
    shape: Shape, context: int, new_tokens: int, op: Callable[..., object]
) -> dict[str, Callable[[], object]]:
    """RoPE, the cache write and the attention of one layer whose cache ends in the new tokens."""
    old = context - new_tokens
    query = _bf16(1, new_tokens, shape.num_heads, shape.head_dim)
    key = _bf16(1, new_tokens, shape.num_kv_heads, shape.head_dim)
    value = torch.randn_like(key)
    k_cache = _bf16(1, shape.num_kv_heads, context, shape.head_dim)
    v_cache = torch.randn_like(k_cache)
    angles = torch.rand(1, new_tokens, shape.head_dim // 2).repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    seq_lens, slots = torch.tensor(old), torch.arange(old, context)

    def rotated(x: Tensor) -> Tensor:
        heads, half = x.transpose(1, 2), x.shape[-1] // 2
        turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
        return heads * cos[:, None] + turned * sin[:, None]

    def sdpa() -> Tensor:
        k_cache.index_copy_(2, slots, rotated(key))
        v_cache.index_copy_(2, slots, value.transpose(1, 2))
        return F.scaled_dot_product_attention(
            rotated(query), k_cache, v_cache, is_causal=old == 0, enable_gqa=True
        )

    return {OURS: lambda: op(query, key, value, k_cache, v_cache, seq_lens, cos, sin), "sdpa": sdpa}


def decode_attention(shape: Shape, context: int) -> Case:
    read_bytes = 2 * 2 * shape.num_kv_heads * context * shape.head_dim
    op = fasttps.ops.rope_attention_decode
    layers = [_attention(shape, context, 1, op) for _ in range(_copies(read_bytes))]
    return Case(
        f"rope_attention_decode {shape.name} context {context}",
        torch.bfloat16,
        _in_turn(layers),
        read_bytes=read_bytes,
        footprint_bytes=read_bytes * len(layers),
    )


def prefill_attention(shape: Shape, tokens: int) -> Case:
    return Case(
        f"causal_prefill {shape.name} tokens {tokens}",
        torch.bfloat16,
        _attention(shape, tokens, tokens, fasttps.ops.causal_prefill),
        flops=4 * shape.num_heads * shape.head_dim * tokens * (tokens + 1) // 2,
    )


def linear(shape: Shape, tokens: int) -> Case:
    rows, cols = shape.hidden_size, shape.hidden_size
    form = PackedFormat.of(torch.bfloat16)

    def layer() -> dict[str, Callable[[], object]]:
        weight, x = _bf16(rows, cols, scale=cols**-0.5), _bf16(tokens, cols)
        packed = fasttps.ops.pack_weight(weight, format=form)
        return {
            OURS: lambda: fasttps.ops.packed_linear(x, packed, format=form, rows=rows),
            "linear": lambda: F.linear(x, weight),
        }

    read_bytes = 2 * rows * cols
    layers = [layer() for _ in range(_copies(read_bytes))]
    return Case(
        f"packed_linear {shape.name} {rows}x{cols} tokens {tokens}",
        torch.bfloat16,
        _in_turn(layers),
        read_bytes=read_bytes,
        footprint_bytes=read_bytes * len(layers),
    )


def mlp(shape: Shape, tokens: int) -> Case:
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    form = PackedFormat.of(torch.bfloat16)

    def layer() -> dict[str, Callable[[], object]]:
        gate = _bf16(intermediate, hidden, scale=hidden**-0.5)
        up = _bf16(intermediate, hidden, scale=hidden**-0.5)
        down = _bf16(hidden, intermediate, scale=intermediate**-0.5)
        x = _bf16(tokens, hidden)
        packed_gate_up = fasttps.ops.pack_gate_up(gate, up, format=form)
        packed_down = fasttps.ops.pack_weight(down, format=form)
        return {
            OURS: lambda: fasttps.ops.gate_up_silu_mlp(
                x,
                packed_gate_up,
                packed_down,
                gate_up_format=form,
                down_format=form,
                intermediate_size=intermediate,
            ),
            "linear": lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        }

    read_bytes = 2 * 3 * hidden * intermediate
    layers = [layer() for _ in range(_copies(read_bytes))]
    return Case(
        f"gate_up_silu_mlp {shape.name} tokens {tokens}",
        torch.bfloat16,
        _in_turn(layers),
        read_bytes=read_bytes,
        footprint_bytes=read_bytes * len(layers),
        flops=6 * tokens * hidden * intermediate if tokens > 1 else 0,
    )


def random_llama(quick: bool) -> Any:
    """A Llama of SmolLM2-135M's shape with random weights: speed does not ask which."""
    import transformers

    shape = SMOLLM2_135M
    config = transformers.LlamaConfig(
        vocab_size=4096 if quick else 49152,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=4 if quick else 30,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def bytes_per_token(model: Any, context: int) -> int:
    """Weights that a token reads, and the keys and values of `context` tokens; unpatched."""
    config, table = model.config, model.get_input_embeddings().weight
    looked_up = 0 if table is model.get_output_embeddings().weight else table.nbytes
    weights = sum(parameter.nbytes for parameter in model.parameters()) - looked_up
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return weights + 2 * config.num_hidden_layers * heads * head_dim * context * table.itemsize


@dataclass
class Speed:
    """Tokens a second, of each round."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def add(self, prompt_tokens: int, new_tokens: int, prefill_s: float, decode_s: float) -> None:
        self.prefill.append(prompt_tokens / prefill_s)
        self.decode.append((new_tokens - 1) / decode_s)


def model_record(
    name: str, plain: Any, patched: Any, *, prompt_tokens: int, new_tokens: int, quick: bool
) -> dict[str, Any]:
    """Both models answer a random prompt in turn: `model.generate`, and `fasttps.generate`.

    `patched` is a copy of `plain` that `fasttps.patch` has been called on.
    """
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, plain.config.vocab_size, (1, prompt_tokens), generator=generator)
    token_bytes = bytes_per_token(plain, prompt_tokens + new_tokens // 2)
    read = Ruler(quick=quick).read(token_bytes)
    speeds = {OURS: Speed(), TRANSFORMERS: Speed()}
    for turn in range(2 if quick else 6):
        read.sample()
        ours = fasttps.generate(
            patched, prompt, max_new_tokens=new_tokens, stop_token_ids=(), repetition_penalty=1.0
        )
        theirs = _transformers_seconds(plain, prompt, new_tokens)
        if turn > 0:  # the first finds all cold
            speeds[OURS].add(prompt_tokens, new_tokens, ours.prefill_s, ours.decode_s)
            speeds[TRANSFORMERS].add(prompt_tokens, new_tokens, *theirs)
    record: dict[str, Any] = {
        "model": name,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "bytes_per_token": token_bytes,
        "read_gb_per_s": round(read.rate, 2),
        "read_loop": read.best,
    }
    for way, speed in speeds.items():
        decode = statistics.median(speed.decode)
        share = decode * token_bytes / 1e9 / read.rate
        try:
            share_of_limit(f"{name}, {way}", decode * token_bytes / 1e9, read.rate)
        except BrokenRulerError as error:
            record["broken_ruler"] = str(error)
        record |= {
            f"{way}_prefill_tokens_per_s": round(statistics.median(speed.prefill), 2),
            f"{way}_decode_tokens_per_s": round(decode, 2),
            f"{way}_share_of_read_bandwidth": round(share, 4),
        }
    for part in ("prefill", "decode"):
        ours_s, theirs_s = (record[f"{way}_{part}_tokens_per_s"] for way in speeds)
        record[f"{part}_over_{TRANSFORMERS}"] = round(ours_s / theirs_s, 3)
    return record


def _transformers_seconds(model: Any, prompt: Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds to the first token and from there to the last, of transformers' own `generate`."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    times: list[float] = []

    class Clock(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([Clock()]),
        )
    return times[0] - begin, times[-1] - times[0]
