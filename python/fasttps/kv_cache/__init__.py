"""A KV cache that is allocated once and written in place, for transformers' models.

steps.py    how many tokens all layers hold
layer.py    a layer of full attention
sliding.py  a layer that keeps a ring of its window
file.py     a cache in a file
cache.py    `StaticKVCache`, which holds them
"""

from __future__ import annotations

from fasttps.kv_cache.cache import StaticKVCache
from fasttps.kv_cache.layer import StaticKVLayer
from fasttps.kv_cache.sliding import SlidingKVLayer

__all__ = ["SlidingKVLayer", "StaticKVCache", "StaticKVLayer"]
