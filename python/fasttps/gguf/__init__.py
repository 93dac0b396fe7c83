"""GGUF files of the Llama architecture.

header.py     metadata and places of the tensors, checked against the file
config.py     the config of transformers from the metadata
tokenizer.py  the tokenizer from the metadata
tensors.py    the tensors' bytes and values, under transformers' names
load.py       `load_gguf`, which makes the model of them
"""

from __future__ import annotations

from fasttps.gguf.config import UnsupportedGguf
from fasttps.gguf.header import BrokenGguf
from fasttps.gguf.load import LoadedGguf, load_gguf

__all__ = ["BrokenGguf", "LoadedGguf", "UnsupportedGguf", "load_gguf"]
