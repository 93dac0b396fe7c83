"""`fasttps.save` and `fasttps.load`: a patched model as a folder, its weights as they are packed.

    config.json, generation_config.json, tokenizer files   as transformers writes them
    fasttps.json                                           what each module is, see manifest.py
    fasttps-00001-of-00002.safetensors, ...                tensors, each at a multiple of 64 bytes

The weights are mapped into memory, so that loading takes no longer than making the modules.
"""

from __future__ import annotations

from fasttps.packed_model.manifest import MANIFEST, BrokenModel, is_packed_model
from fasttps.packed_model.reading import load
from fasttps.packed_model.writing import save

__all__ = ["MANIFEST", "BrokenModel", "is_packed_model", "load", "save"]
