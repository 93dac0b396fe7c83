"""Small GGUF files of the Llama architecture, of any types, and what they hold in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from tests.support.tiny_folder import SPECIAL_TOKENS, tokenizer  # noqa: E402

Kind = gguf.GGMLQuantizationType
# Where the scales of a block lie: offset and, in f16, how large they are made.
SCALES = {
    Kind.Q4_0: [(0, 0.02)],
    Kind.Q4_1: [(0, 0.02), (2, -0.15)],
    Kind.Q5_0: [(0, 0.01)],
    Kind.Q5_1: [(0, 0.01), (2, -0.15)],
    Kind.Q8_0: [(0, 0.002)],
    Kind.Q4_K: [(0, 0.001), (2, 0.005)],
    Kind.Q5_K: [(0, 0.0005), (2, 0.005)],
    Kind.Q6_K: [(208, 0.0001)],
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def stored_name(parameter: str) -> str:
    """llama.cpp's name of a parameter of transformers' Llama."""
    if parameter in WHOLE:
        return WHOLE[parameter]
    _, _, layer, rest = parameter.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def random_blocks(kind: Any, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks [rows, bytes] of random bits, with scales of either sign that keep values small."""
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        values = rng.normal(0, 0.08, (rows, cols)).astype(np.float32)
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    blocks = rng.integers(0, 256, (rows, cols // elements, block_bytes), dtype=np.uint8)
    for offset, scale in SCALES[kind]:
        scales = (
            scale * rng.uniform(0.3, 1, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])
        )
        blocks[:, :, offset : offset + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def config(**changes: Any) -> Any:
    """Sizes that K quants allow; grouped heads; no row count a multiple of a panel."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "vocab_size": len(tokenizer()),
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            **changes,
        }
    )


def write_llama(
    path: Path,
    kind_of: Callable[[str], Any],
    made: Any = None,
    *,
    alignment: int | None = None,
    metadata: Callable[[Any], None] = lambda writer: None,
    drop: str | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a file with random weights, a matrix `name` in the type `kind_of(name)`.

    metadata: puts more pairs into the file. drop: a tensor that is left out; extra: others.

    Returns:
        transformers' state dict of it, in float32, by the gguf package.
    """
    from transformers import LlamaForCausalLM

    made = config() if made is None else made
    with torch.device("meta"):
        model = LlamaForCausalLM(made)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    _write_metadata(writer, made)
    metadata(writer)
    rng, state = np.random.default_rng(0), {}
    heads = {"q_proj": made.num_attention_heads, "k_proj": made.num_key_value_heads}
    for name, weight in model.named_parameters():
        stored = stored_name(name)
        if weight.dim() == 1:
            values = rng.normal(1.0, 0.1, weight.shape).astype(np.float32)
            writer.add_tensor(stored, values) if stored != drop else None
        else:
            kind = kind_of(name)
            blocks = random_blocks(kind, *weight.shape, rng)
            values = gguf.quants.dequantize(blocks, kind)
            if stored != drop:
                writer.add_tensor(stored, blocks, raw_dtype=kind)
        for projection, count in heads.items():
            if projection in name:  # rows of a head: [D/2, 2] in the file, [2, D/2] in transformers
                pairs = values.reshape(count, weight.shape[0] // count // 2, 2, -1)
                values = pairs.swapaxes(1, 2).reshape(values.shape)
        state[name] = torch.from_numpy(np.ascontiguousarray(values)).float()
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if made.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _write_metadata(writer: Any, made: Any) -> None:
    writer.add_block_count(made.num_hidden_layers)
    writer.add_context_length(made.max_position_embeddings)
    writer.add_embedding_length(made.hidden_size)
    writer.add_feed_forward_length(made.intermediate_size)
    writer.add_head_count(made.num_attention_heads)
    writer.add_head_count_kv(made.num_key_value_heads)
    writer.add_key_length(made.head_dim)
    writer.add_value_length(made.head_dim)
    writer.add_layer_norm_rms_eps(made.rms_norm_eps)
    writer.add_rope_dimension_count(made.head_dim)
    writer.add_rope_freq_base(made.rope_parameters["rope_theta"])
    words = tokenizer()
    tokens = [words.convert_ids_to_tokens(at) for at in range(len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
