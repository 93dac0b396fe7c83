"""merge_attention against the same merge written in torch: partial results of a split context.

Counted bytes: every partial and its logarithm of the softmax sum, read once; the result, written.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import shapes
import torch

import fasttps


def merge_in_torch(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(lses)
    weights = torch.softmax(stacked, dim=0).permute(0, 1, 3, 2)[..., None]
    return (torch.stack(outs) * weights).sum(0), torch.logsumexp(stacked, dim=0)


def case_of(model: shapes.ModelShape, splits: int, batch: int, new_tokens: int) -> harness.Case:
    out_shape = (batch, new_tokens, model.num_heads, model.head_dim)
    outs = [torch.randn(out_shape) for _ in range(splits)]
    lses = [torch.randn(batch, model.num_heads, new_tokens) for _ in range(splits)]
    partial_bytes = 4 * (outs[0].numel() + lses[0].numel())
    return harness.Case(
        f"{model.name} splits {splits} batch {batch} new {new_tokens}",
        torch.float32,
        {
            harness.OURS: lambda: fasttps.ops.merge_attention(outs, lses),
            "torch_softmax": lambda: merge_in_torch(outs, lses),
        },
        read_bytes=splits * partial_bytes,
        written_bytes=partial_bytes,
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    for model in (shapes.SMOLLM2_135M,) if quick else shapes.ALL:
        for splits, batch, new_tokens in (
            ((2, 1, 1),) if quick else ((2, 1, 1), (8, 8, 1), (4, 1, 512))
        ):
            yield case_of(model, splits, batch, new_tokens)


if __name__ == "__main__":
    harness.main("merge_attention", cases)
