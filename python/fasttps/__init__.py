"""FastTPS: decoder-only language models, fast in the token phase.

- `fasttps.patch(model)`: run a HuggingFace model through the fused ops; `.undo()` restores it.
- `fasttps.generate(model, input_ids, max_new_tokens=...)`: a loop over tokens that costs nothing.
- `fasttps.save(patch, folder)`, `fasttps.load(folder)`: a model with its weights packed.
- `fasttps.load_gguf(path)`: a model and its tokenizer from a GGUF file.
- `fasttps.load_checkpoint(folder)`: the same from a folder of AWQ, GPTQ or compressed-tensors.
- `fasttps.StaticKVCache`: a KV cache allocated once, for `model.generate(past_key_values=...)`.
- `fasttps.register_attention()`: `attn_implementation="fasttps"` for any transformers model.
- `fasttps.ops`: the ops (also `torch.ops.fasttps`); `fasttps.reference`: the same in plain PyTorch.
- `fasttps.isa`: which instruction sets this CPU runs and which the ops use.
- `fasttps.cmake_prefix_path`: where CMake's `find_package(fasttps)` finds the C++ side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fasttps import _library
from fasttps._version import __version__

_library.load()

from fasttps import isa, ops, reference  # noqa: E402
from fasttps.models.attention_interface import register_on_import  # noqa: E402

# So that attn_implementation="fasttps" is known as soon as transformers is imported.
register_on_import()

if TYPE_CHECKING:
    from fasttps.checkpoint import load_checkpoint
    from fasttps.generation import Generation, generate
    from fasttps.gguf import load_gguf
    from fasttps.kv_cache import StaticKVCache
    from fasttps.models.attention_interface import register_attention
    from fasttps.models.patch import Patch, PatchError, patch
    from fasttps.packed_model import load, save

cmake_prefix_path: str = str(_library.PACKAGE_DIR / "share" / "cmake")

# transformers takes seconds to import, and the ops work without it.
_LAZY = {
    "Generation": "fasttps.generation",
    "Patch": "fasttps.models.patch",
    "PatchError": "fasttps.models.patch",
    "StaticKVCache": "fasttps.kv_cache",
    "generate": "fasttps.generation",
    "load": "fasttps.packed_model",
    "load_checkpoint": "fasttps.checkpoint",
    "load_gguf": "fasttps.gguf",
    "patch": "fasttps.models.patch",
    "register_attention": "fasttps.models.attention_interface",
    "save": "fasttps.packed_model",
}

__all__ = [
    "Generation",
    "Patch",
    "PatchError",
    "StaticKVCache",
    "__version__",
    "cmake_prefix_path",
    "generate",
    "isa",
    "load",
    "load_checkpoint",
    "load_gguf",
    "ops",
    "patch",
    "reference",
    "register_attention",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fasttps' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
