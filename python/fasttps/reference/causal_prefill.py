"""`causal_prefill` in plain PyTorch: the two attention ops differ in algorithm, not in meaning."""

from .rope_attention_decode import rope_attention_decode

causal_prefill = rope_attention_decode
