"""Arguments of `decode_step`, and what PyTorch makes of them from dense weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fasttps import ops, reference
from fasttps.reference.attention import apply_rope, read_rows
from fasttps.reference.gate_up_silu_mlp import ACTIVATIONS
from tests.support.attention import randn, rope_tables
from tests.support.quantized import alternated, pack_near

EPS = 1e-5


@dataclass
class Decoder:
    """A few random decoder layers of one shape.

    Attributes:
        formats: of q, k, v, o, gate_up and down, and of the embedding with lm_head.
        int8_cache: the caches are int8, with scales.
    """

    hidden_size: int = 40
    intermediate_size: int = 72
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    vocab_size: int = 75
    dtype: torch.dtype = torch.float32
    formats: Sequence[int] | None = None
    group_size: int = 0
    max_seq_len: int = 24
    biased: bool = False
    int8_cache: bool = False
    interleaved: bool = False
    rotary_dim: int = 0  # 0: head_dim
    activation: str = "silu"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.formats is None:
            self.formats = [int(ops.PackedFormat.of(self.dtype))] * 7

    def group_size_of(self, packed_format: int) -> int:
        return self.group_size if packed_format in (4, 5, 9) else 32 if packed_format == 6 else 0

    def shapes(self) -> list[tuple[int, int]]:
        """Of q, k, v, o, gate, up, down."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return [
            *((query, hidden), (kv, hidden), (kv, hidden), (hidden, query)),
            *((inner, hidden), (inner, hidden), (hidden, inner)),
        ]

    def arguments(
        self, input: Tensor, past: int | list[int], *, ends: bool = False, seed: int = 0
    ) -> dict[str, Any]:
        """Keyword arguments of the op; with `ends`, embedding, final norm and lm_head too."""
        assert self.formats is not None
        batch, new_tokens = input.shape[:2]
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        norms: list[Tensor] = []
        for layer in range(self.layers):
            at = seed + 100 * (layer + 1)
            dense = [
                randn(at + i, *shape).div(shape[1] ** 0.5).to(self.dtype)
                for i, shape in enumerate(self.shapes())
            ]
            for i, packed_format in enumerate(self.formats[:6]):
                options = {"format": packed_format}
                if self.group_size_of(packed_format):
                    options["group_size"] = self.group_size_of(packed_format)
                packed = pack_near(dense[6 if i == 5 else i], **options)
                if i == 4:
                    packed = alternated(packed, pack_near(dense[5], **options), len(dense[5]))
                weights.append(packed)
            if self.biased:
                biases += [
                    randn(at + 20 + i, rows, dtype=self.dtype) if i != 1 else None
                    for i, (rows, _) in enumerate(self.shapes())
                ]
            norms += [
                1 + 0.1 * randn(at + 30 + i, self.hidden_size, dtype=self.dtype) for i in range(2)
            ]
        slots = (batch, self.num_kv_heads, self.max_seq_len)
        kv = [
            randn(seed + 9 + i, *slots, self.head_dim, dtype=self.dtype)
            for i in range(2 * self.layers)
        ]
        seq_lens = torch.tensor(past)
        positions = seq_lens.reshape(-1, 1) + torch.arange(new_tokens)
        rotary_dim = self.rotary_dim or self.head_dim
        cos, sin = rope_tables(positions, rotary_dim, self.interleaved)
        arguments: dict[str, Any] = {
            "input": input,
            "weights": weights,
            "norms": norms,
            "biases": biases,
            "head_norms": [],
            "out_norms": [],
            "k_caches": kv[: self.layers],
            "v_caches": kv[self.layers :],
            "seq_lens": seq_lens,
            "cos": cos,
            "sin": sin,
            "formats": list(self.formats[:6]) * self.layers,
            "group_sizes": [self.group_size_of(f) for f in self.formats[:6]] * self.layers,
            "num_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
            "norm_eps": EPS,
            "activation": self.activation,
            "interleaved": self.interleaved,
            **self.options,
        }
        if self.int8_cache:
            for name in ("k", "v"):
                rows = [reference.attention.quantize_rows(t) for t in arguments[f"{name}_caches"]]
                arguments[f"{name}_caches"] = [row for row, _ in rows]
                arguments[f"{name}_scales"] = [scale for _, scale in rows]
        if ends:
            packed_format = self.formats[6]
            table = randn(seed + 7, self.vocab_size, self.hidden_size, dtype=self.dtype)
            options = {"format": packed_format}
            if self.group_size_of(packed_format):
                options["group_size"] = self.group_size_of(packed_format)
            packed = pack_near(table, **options)
            norms.append(1 + 0.1 * randn(seed + 8, self.hidden_size, dtype=self.dtype))
            for name in ("embedding", "lm_head"):
                arguments[name] = packed
                arguments[f"{name}_format"] = packed_format
                arguments[f"{name}_group_size"] = self.group_size_of(packed_format)
            arguments["vocab_size"] = self.vocab_size
        return arguments

    def in_torch(self, arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
        """The step as a PyTorch user writes it, every intermediate in `dtype`. Caches are copied.

        Without kv_start and scales; the weights are what was packed, dequantised.
        """
        batch, new_tokens = arguments["input"].shape[:2]
        past = arguments["seq_lens"].expand(batch)
        if "embedding" in arguments:
            table = self.dense(arguments["embedding"], arguments["embedding_format"], "embedding")
            x = table.to(dtype)[arguments["input"]]
        else:
            x = arguments["input"].to(dtype)
        cos, sin = arguments["cos"].to(dtype), arguments["sin"].to(dtype)
        slot = torch.arange(self.max_seq_len)
        row = past[:, None, None] + torch.arange(new_tokens)[None, :, None]
        visible = slot <= row
        if arguments.get("windows"):  # the same of every layer
            visible &= slot > row - arguments["windows"][0]
        if arguments.get("kv_start") is not None:
            visible &= slot >= arguments["kv_start"][:, None, None]
        for layer in range(self.layers):
            w = [
                self.dense(arguments["weights"][6 * layer + i], arguments["formats"][i], i)
                for i in range(6)
            ]
            q, k, v, o, (gate, up), down = (
                tuple(half.to(dtype) for half in x) if isinstance(x, tuple) else x.to(dtype)
                for x in w
            )
            b = [None] * 7
            if arguments["biases"]:
                b = [
                    None if bias is None else bias.to(dtype)
                    for bias in arguments["biases"][7 * layer : 7 * layer + 7]
                ]
            n = norm(x, arguments["norms"][2 * layer])
            query, key, value = (
                functional.linear(n, weight, bias).unflatten(-1, (-1, self.head_dim))
                for weight, bias in zip((q, k, v), b)
            )
            query = apply_rope(query, cos, sin, self.interleaved)
            key = apply_rope(key, cos, sin, self.interleaved)
            caches = []
            for name, rows in (("k", key), ("v", value)):
                scales = arguments.get(f"{name}_scales")
                cache = read_rows(
                    arguments[f"{name}_caches"][layer],
                    None if scales is None else scales[layer],
                    self.max_seq_len,
                    dtype,
                ).clone()
                for at, first in enumerate(past.tolist()):
                    cache[at][:, first : first + new_tokens] = rows[at].transpose(0, 1)
                caches.append(cache.nan_to_num(0.0, 0.0, 0.0))
            out = functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                *caches,
                attn_mask=visible[:, None],
                enable_gqa=True,
            ).transpose(1, 2)
            x = x + functional.linear(out.flatten(-2), o, b[3])
            m = norm(x, arguments["norms"][2 * layer + 1])
            gated = ACTIVATIONS[self.activation](functional.linear(m, gate, b[4]))
            x = x + functional.linear(gated * functional.linear(m, up, b[5]), down, b[6])
        if len(arguments["norms"]) > 2 * self.layers:
            x = norm(x, arguments["norms"][-1])
        if "lm_head" in arguments:
            x = functional.linear(
                x,
                self.dense(arguments["lm_head"], arguments["lm_head_format"], "embedding").to(
                    dtype
                ),
            )
        return x

    def dense(self, packed: Tensor, packed_format: int, which: int | str) -> Any:
        """The weights of one matrix, dequantised; gate and up as a pair."""
        if which == "embedding":
            rows, cols = self.vocab_size, self.hidden_size
        else:
            rows, cols = self.shapes()[{4: 4, 5: 6}.get(int(which), int(which))]
        options = {
            "format": packed_format,
            "rows": rows,
            "cols": cols,
            "group_size": self.group_size_of(packed_format),
        }
        if which == 4:
            return ops.unpack_gate_up(packed, **options)
        return ops.unpack_weight(packed, **options)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as transformers' Llama writes it: formed in float32 at least, rounded, scaled."""
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight.to(x.dtype) * scaled.to(x.dtype)
