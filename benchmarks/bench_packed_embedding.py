"""packed_embedding against F.embedding, for one token and for a prompt.

Counted bytes: the rows read and the result written.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import shapes
import torch
import torch.nn.functional as F

import fasttps
from fasttps.ops import PackedFormat

ROWS = 32000


def case_of(model: shapes.ModelShape, tokens: int) -> harness.Case:
    dtype, cols = torch.bfloat16, model.hidden_size
    weight = torch.randn(ROWS, cols).to(dtype)
    packed_format = PackedFormat.of(dtype)
    packed = fasttps.ops.pack_weight(weight, format=packed_format)
    ids = torch.randint(ROWS, (1, tokens))
    row_bytes = tokens * cols * dtype.itemsize
    return harness.Case(
        f"{model.name} {ROWS}x{cols} tokens {tokens}",
        dtype,
        {
            harness.OURS: lambda: fasttps.ops.packed_embedding(
                ids, packed, format=packed_format, rows=ROWS, cols=cols, dtype=dtype
            ),
            "embedding": lambda: F.embedding(ids, weight),
        },
        read_bytes=row_bytes,
        written_bytes=row_bytes,
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    for model in (shapes.SMOLLM2_135M,) if quick else shapes.ALL:
        for tokens in (1, 64) if quick else (1, 512):
            yield case_of(model, tokens)


if __name__ == "__main__":
    harness.main("packed_embedding", cases)
