"""HuggingFace folders whose weights are quantised already, packed as they are.

schemes.py             which scheme a folder states, or why it is not read
weights.py             one quantised weight: its quants, scales and zero points, and how it packs
words.py               quants out of the words that checkpoints have them in
awq.py gptq.py compressed_tensors.py   where each scheme keeps the parts of a weight
tensors.py             the tensors of a folder, quantised and plain, by their names in the model
pack.py                a model on the meta device over those tensors
load.py                `load_checkpoint`, which makes the model
"""

from __future__ import annotations

from fasttps.checkpoint.load import LoadedCheckpoint, load_checkpoint
from fasttps.checkpoint.schemes import BrokenCheckpoint, UnsupportedCheckpoint, is_quantized

__all__ = [
    "BrokenCheckpoint",
    "LoadedCheckpoint",
    "UnsupportedCheckpoint",
    "is_quantized",
    "load_checkpoint",
]
