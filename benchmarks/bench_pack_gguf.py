"""pack_gguf against a copy of the blocks, the least it could cost.

Counted bytes: the blocks read once, the packed weight written once.
"""

from __future__ import annotations

from collections.abc import Iterator

import harness
import shapes
import torch

import fasttps
from fasttps.ops import PackedFormat

# Columns and bytes of a block.
BLOCKS = {
    PackedFormat.INT4: ("q4_0", 32, 18),
    PackedFormat.INT4_MIN: ("q4_1", 32, 20),
    PackedFormat.INT8_GROUP: ("q8_0", 32, 34),
    PackedFormat.Q4_K: ("q4_k", 256, 144),
    PackedFormat.Q6_K: ("q6_k", 256, 210),
}


def case_of(model: shapes.ModelShape, packed_format: PackedFormat) -> harness.Case:
    name, block_cols, block_bytes = BLOCKS[packed_format]
    rows, cols = model.intermediate_size, model.hidden_size // 256 * 256
    blocks = torch.randint(256, (rows, cols // block_cols * block_bytes), dtype=torch.uint8)

    def pack() -> torch.Tensor:
        return fasttps.ops.pack_gguf(blocks, format=packed_format, rows=rows, cols=cols)

    return harness.Case(
        f"{model.name} {name} {rows}x{cols}",
        torch.float16,
        {harness.OURS: pack, "clone": blocks.clone},
        read_bytes=blocks.numel(),
        written_bytes=pack().numel(),
    )


def cases(quick: bool) -> Iterator[harness.Case]:
    for model in (shapes.SMOLLM2_135M,) if quick else (shapes.LLAMA_3_2_1B,):
        for packed_format in BLOCKS:
            yield case_of(model, packed_format)


if __name__ == "__main__":
    harness.main("pack_gguf", cases)
