"""The config of transformers for the metadata of a GGUF file of the Llama architecture.

llama.cpp's keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from array import array
from typing import Any

from fasttps.gguf.header import BrokenGguf, Header

ARCHITECTURE = "llama"


class UnsupportedGguf(ValueError):
    """A whole file of a model that is not read here."""


def llama_config(header: Header, rope_factors: list[float] | None = None) -> Any:
    """The LlamaConfig of a file.

    rope_factors: the values of the tensor `rope_freqs.weight`, if there is one: each frequency
        of RoPE is divided by its factor. Llama 3.1 and later have it.

    Raises:
        UnsupportedGguf: another architecture, or a kind of Llama that is not transformers' Llama.
        BrokenGguf: a key is missing or makes no sense.
    """
    from transformers import LlamaConfig

    if header.architecture != ARCHITECTURE:
        raise UnsupportedGguf(f"is of the architecture {header.architecture!r}, not a Llama")
    read = _Keys(header.metadata)
    for key in ("expert_count", "attention.sliding_window"):
        if read.get(key, 0):
            raise UnsupportedGguf(f"has {ARCHITECTURE}.{key} = {read.get(key, 0)}")
    heads, hidden = read.count("attention.head_count"), read.count("embedding_length")
    kv_heads = read.count("attention.head_count_kv", heads)
    head_dim = read.count("attention.key_length", hidden // heads)
    if heads % kv_heads or hidden % heads or head_dim % 2:
        raise BrokenGguf(
            f"has {heads} heads of {head_dim} and {kv_heads} kv heads in a width of {hidden}"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := read.count(key, head_dim)) != head_dim:
            raise UnsupportedGguf(f"has {ARCHITECTURE}.{key} = {other} and heads of {head_dim}")
    tensors = header.tensors
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise BrokenGguf("has no matrix token_embd.weight")
    theta = float(read.get("rope.freq_base", 10000.0))
    rope = _rope_scaling(read)
    if rope_factors is not None:
        rope = _llama3_scaling(rope_factors, head_dim, theta)
    tokens = _Keys(header.metadata, "tokenizer.ggml.")
    return LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=read.count("feed_forward_length"),
        num_hidden_layers=read.count("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=read.count("context_length"),
        rms_norm_eps=float(read.get("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_theta": theta, **rope},
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=tokens.get("bos_token_id", None),
        eos_token_id=tokens.get("eos_token_id", None),
        pad_token_id=tokens.get("padding_token_id", None),
    )


def end_tokens(header: Header) -> list[int]:
    """Ids that end an answer: of the text, of a turn, of a message."""
    tokens = _Keys(header.metadata, "tokenizer.ggml.")
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (tokens.get(key, None) for key in keys)
    return list(dict.fromkeys(int(token) for token in ids if token is not None))


class _Keys:
    """Metadata under a prefix."""

    def __init__(self, metadata: dict[str, Any], prefix: str = f"{ARCHITECTURE}.") -> None:
        self._metadata = metadata
        self._prefix = prefix

    def get(self, key: str, *default: Any) -> Any:
        """A number or a string; of an array of equal ones (one a layer), that one."""
        value = self._metadata.get(self._prefix + key)
        if value is None:
            if not default:
                raise BrokenGguf(f"lacks {self._prefix}{key}")
            return default[0]
        if isinstance(value, (array, list)):
            if len(set(value)) != 1:
                raise UnsupportedGguf(f"has {self._prefix}{key} that differs between layers")
            value = value[0]
        return value

    def count(self, key: str, *default: int) -> int:
        value = self.get(key, *default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise BrokenGguf(f"has {self._prefix}{key} = {value!r}")
        return value


def _rope_scaling(read: _Keys) -> dict[str, Any]:
    kind = read.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedGguf(f"has RoPE scaling of the type {kind!r}")
    made = {"rope_type": kind, "factor": float(read.get("rope.scaling.factor"))}
    if kind == "yarn":
        made["original_max_position_embeddings"] = read.count(
            "rope.scaling.original_context_length"
        )
    return made


def _llama3_scaling(factors: list[float], head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's own scaling, whose parameters the file does not state: they are recognised.

    With wavelength w = 2 pi theta^(2i/D) and original context C = 8192: 1 for w < C/4, `factor`
    for w > C/1, and between them 1 / ((1 - s) / factor + s) with s = (C/w - 1) / (4 - 1).
    """
    factor, low, high, context = max(factors), 1.0, 4.0, 8192
    for at, given in enumerate(factors):
        turns = context / (2 * math.pi * theta ** (2 * at / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(given - expected) > 1e-4 * expected:
            raise UnsupportedGguf("has factors of RoPE's frequencies that are not Llama 3's")
    if len(factors) != head_dim // 2:
        raise BrokenGguf(f"has {len(factors)} factors of RoPE's frequencies for {head_dim // 2}")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
