"""The ops: thin, documented functions over `torch.ops.fasttps.*`, inference only.

`fasttps.reference` has the same functions in plain PyTorch.
"""

from .causal_prefill import causal_prefill
from .decode_step import DecodeStep, decode_step
from .gate_up_silu_mlp import gate_up_silu_mlp
from .kv_cache_update import kv_cache_update_
from .merge_attention import merge_attention
from .pack_gguf import pack_gguf
from .pack_quants import pack_quants
from .pack_weight import (
    LAYOUT_VERSION,
    PackedFormat,
    pack_gate_up,
    pack_weight,
    unpack_gate_up,
    unpack_weight,
)
from .packed_embedding import packed_embedding
from .packed_linear import packed_linear
from .rope_attention_decode import rope_attention_decode

__all__ = [
    "LAYOUT_VERSION",
    "DecodeStep",
    "PackedFormat",
    "causal_prefill",
    "decode_step",
    "gate_up_silu_mlp",
    "kv_cache_update_",
    "merge_attention",
    "pack_gate_up",
    "pack_gguf",
    "pack_quants",
    "pack_weight",
    "packed_embedding",
    "packed_linear",
    "rope_attention_decode",
    "unpack_gate_up",
    "unpack_weight",
]
