"""kv_cache_update_ against what a growing cache costs: torch.cat, and index_copy_ in place.

One decode step of a model writes one row a head; the concatenation copies the whole cache.
Counted bytes: the new keys and values, read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import shapes
import torch

import fasttps


def case_of(
    model: shapes.ModelShape, dtype: torch.dtype, context: int, new_tokens: int
) -> harness.Case:
    rows = (1, new_tokens, model.num_kv_heads, model.head_dim)
    caches = (1, model.num_kv_heads, context + new_tokens, model.head_dim)
    key, value = torch.randn(rows).to(dtype), torch.randn(rows).to(dtype)
    k_cache, v_cache = torch.zeros(caches, dtype=dtype), torch.zeros(caches, dtype=dtype)
    k_old, v_old = k_cache[:, :, :context].clone(), v_cache[:, :, :context].clone()
    k_new, v_new = key.transpose(1, 2), value.transpose(1, 2)
    seq_lens = torch.tensor(context)
    slots = torch.arange(context, context + new_tokens)

    def concatenate() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat((k_old, k_new), dim=2), torch.cat((v_old, v_new), dim=2)

    def index_copy() -> None:
        k_cache.index_copy_(2, slots, k_new)
        v_cache.index_copy_(2, slots, v_new)

    calls: dict[str, Callable[[], object]] = {
        harness.OURS: lambda: fasttps.ops.kv_cache_update_(k_cache, v_cache, key, value, seq_lens),
        "index_copy": index_copy,
        "cat": concatenate,
    }
    moved_bytes = (key.numel() + value.numel()) * key.element_size()
    return harness.Case(
        f"{model.name} ctx {context} new {new_tokens}",
        dtype,
        calls,
        read_bytes=moved_bytes,
        written_bytes=moved_bytes,
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    models = (shapes.SMOLLM2_135M,) if quick else shapes.ALL
    for model in models:
        for context, new_tokens in ((1024, 1),) if quick else ((1024, 1), (4096, 1), (0, 512)):
            yield case_of(model, torch.bfloat16, context, new_tokens)


if __name__ == "__main__":
    harness.main("kv_cache_update", cases)
