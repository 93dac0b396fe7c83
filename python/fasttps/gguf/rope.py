"""RoPE's parameters, as a config of transformers has them, from the metadata and the factors."""

from __future__ import annotations

import math
from typing import Any

from fasttps.gguf.header import BrokenGguf, UnsupportedGguf
from fasttps.gguf.keys import Keys

# Tensors that are no weights: each frequency of RoPE is divided by its factor.
FREQUENCIES = "rope_freqs.weight"  # Llama 3.1 and later
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # Phi-3 with long contexts
FACTORS = (FREQUENCIES, LONG, SHORT)


def rope_parameters(
    read: Keys, factors: dict[str, list[float]], rotary_dim: int, context: int
) -> dict[str, Any]:
    """rope_parameters of layers that all rotate alike.

    factors: the values of those tensors of FACTORS that the file has.
    """
    theta = read.positive("rope.freq_base", 10000.0)
    for name, values in factors.items():
        if len(values) != rotary_dim // 2:
            raise BrokenGguf(
                f"has {len(values)} factors of RoPE's frequencies in {name} for {rotary_dim // 2}"
            )
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise BrokenGguf(f"has a factor of RoPE's frequencies in {name} that is no factor")
    if FREQUENCIES in factors:
        return {"rope_theta": theta, **_llama3(factors[FREQUENCIES], rotary_dim, theta)}
    if LONG in factors or SHORT in factors:
        return {"rope_theta": theta, **_longrope(read, factors, context)}
    return {"rope_theta": theta, **_scaling(read)}


def _scaling(read: Keys) -> dict[str, Any]:
    kind = read.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind == "longrope":
        raise BrokenGguf(f"lacks {LONG} and {SHORT}, which its RoPE scaling needs")
    if kind not in ("linear", "yarn"):
        raise UnsupportedGguf(f"has RoPE scaling of the type {kind!r}")
    made = {"rope_type": kind, "factor": read.positive("rope.scaling.factor")}
    if kind == "linear":
        return made
    # llama.cpp multiplies these with what transformers computes by itself.
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        if read.number(f"rope.scaling.{key}", 1.0) != 1.0:
            raise UnsupportedGguf(f"has a rope.scaling.{key}")
    for ours, key in {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}.items():
        if f"rope.scaling.{key}" in read:
            made[ours] = read.positive(f"rope.scaling.{key}")
    if scale := read.number("rope.scaling.yarn_log_multiplier", 0.0):
        made |= {"mscale": 1.0, "mscale_all_dim": scale}
    context = read.count("rope.scaling.original_context_length")
    return {**made, "original_max_position_embeddings": context}


def _longrope(read: Keys, factors: dict[str, list[float]], context: int) -> dict[str, Any]:
    if missing := {LONG, SHORT} - factors.keys():
        raise BrokenGguf(f"lacks {missing.pop()}")
    original = read.count("rope.scaling.original_context_length", context)
    made: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": original}
    if "rope.scaling.attn_factor" in read:
        made["attention_factor"] = read.positive("rope.scaling.attn_factor")
    return {**made, "long_factor": factors[LONG], "short_factor": factors[SHORT]}


def _llama3(factors: list[float], rotary_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's own scaling, whose parameters the file does not state: they are recognised.

    With wavelength w = 2 pi theta^(2i/D) and original context C = 8192: 1 for w < C/4, `factor`
    for w > C/1, and between them 1 / ((1 - s) / factor + s) with s = (C/w - 1) / (4 - 1).
    """
    factor, low, high, context = max(factors), 1.0, 4.0, 8192
    for at, given in enumerate(factors):
        turns = context / (2 * math.pi * theta ** (2 * at / rotary_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(given - expected) > 1e-4 * expected:
            raise UnsupportedGguf("has factors of RoPE's frequencies that are not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
