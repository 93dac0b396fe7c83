"""GGUF files as models of transformers.

header.py         metadata and places of the tensors, checked against the file
keys.py           metadata of an architecture, checked as they are read
architectures.py  what sets the architectures apart: a row for each
rope.py           RoPE's parameters from the metadata
config.py         the config of transformers from the metadata
tokenizer.py      the tokenizer from the metadata
tensors.py        the tensors' bytes and values, under transformers' names
load.py, pack.py  `load_gguf`, which makes the model of them, and patches it
"""

from __future__ import annotations

from fasttps.gguf.header import BrokenGguf, UnsupportedGguf
from fasttps.gguf.load import LoadedGguf, load_gguf

__all__ = ["BrokenGguf", "LoadedGguf", "UnsupportedGguf", "load_gguf"]
