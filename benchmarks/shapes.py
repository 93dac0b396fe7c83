"""The shapes of real models that the benchmarks use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fasttps.memory import empty_in_huge_pages
from fasttps.ops import PackedFormat


@dataclass(frozen=True)
class WeightKind:
    """How a weight is packed, and whether activations are rounded to int8."""

    name: str
    format: PackedFormat
    group_size: int = 0
    int8_activation: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return torch.bfloat16 if self.format.is_quantized else self.format.dtype

    @property
    def product(self) -> torch.dtype:
        """What is multiplied with what, as the ruler has it."""
        if self.int8_activation:
            return torch.int8
        return torch.float32 if self.format.is_quantized else self.dtype


BF16 = WeightKind("bf16", PackedFormat.BF16)
QUANTIZED = (
    WeightKind("int8 a8", PackedFormat.INT8, int8_activation=True),
    WeightKind("int8 g32 a8", PackedFormat.INT8_GROUP, 32, int8_activation=True),
    WeightKind("int4 g32 a8", PackedFormat.INT4, 32, int8_activation=True),
    WeightKind("int8 a16", PackedFormat.INT8),
    WeightKind("int4 g32 a16", PackedFormat.INT4, 32),
)
# As AWQ and GPTQ have them, beside a minimum a group in the place of the zero point.
WITH_ZEROS = (
    WeightKind("int4_zero g128 a8", PackedFormat.INT4_ZERO, 128, int8_activation=True),
    WeightKind("int4_zero g128 a16", PackedFormat.INT4_ZERO, 128),
    WeightKind("int4_min g128 a8", PackedFormat.INT4_MIN, 128, int8_activation=True),
    WeightKind("int4_min g128 a16", PackedFormat.INT4_MIN, 128),
)


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_3_2_1B = ModelShape("llama-3.2-1b", 2048, 8192, 32, 8, 64)
SMOLLM2_135M = ModelShape("smollm2-135m", 576, 1536, 9, 3, 64)
PHI_3_MINI = ModelShape("phi-3-mini", 3072, 8192, 32, 32, 96)
LLAMA_2_7B = ModelShape("llama-2-7b", 4096, 11008, 32, 32, 128)
LLAMA_3_8B = ModelShape("llama-3-8b", 4096, 14336, 32, 8, 128)
ALL = (LLAMA_3_2_1B, SMOLLM2_135M, PHI_3_MINI)


def random_kv_cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Keys or values in the memory that a StaticKVCache has."""
    return empty_in_huge_pages(shape, dtype).normal_()


def cos_sin(
    positions: torch.Tensor, rotary_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE tables [1, new_tokens, rotary_dim] of `positions` [new_tokens], halves duplicated."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    angles = (positions.float()[:, None] * frequencies).repeat(1, 2)[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE as transformers writes it: x [batch, heads, new_tokens, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]
