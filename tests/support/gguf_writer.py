"""Any model of `gguf_families` as a GGUF file, written as llama.cpp's converter writes it.

What differs between architectures is after conversion/*.py of llama.cpp (as of llama-cpp-python
0.3.36): the rows of queries and keys from LlamaModel.permute, the norms from Gemma2Model and
Gemma3Model, the convolution from LFM2Model, the factors of RoPE from LlamaModel and Phi3MiniModel.
tests/gguf/test_llama_cpp.py holds this writer against files of that converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from tests.support.gguf_families import FAMILIES, VOCAB  # noqa: E402

Kind = gguf.GGMLQuantizationType
PAIRED_ROWS = ("llama", "mistral3", "granite", "smollm3")  # LlamaModel.undo_permute


def write(
    path: Path,
    model: Any,
    family: str,
    kind_of: Callable[[str], Any] = lambda name: Kind.F32,
    metadata: Callable[[Any], None] = lambda writer: None,
) -> dict[str, torch.Tensor]:
    """Write a model, a matrix `name` of transformers in the type `kind_of(name)`.

    metadata: puts more pairs into the file.

    Returns:
        The state dict that the file stands for, in float32, by the gguf package.
    """
    architecture, config = FAMILIES[family][0], model.config
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, architecture, config)
    metadata(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    state = {}
    for name, factors in rope_factors(config).items():
        writer.add_tensor(name, factors)
    for name, parameter in model.named_parameters():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        values = parameter.detach().numpy()
        module = name.split(".")[-2]
        paired = heads.get(module, 0) if architecture in PAIRED_ROWS else 0
        shift = int(architecture.startswith("gemma") and name.endswith("norm.weight"))
        if paired:  # rows of a head [2, D/2] to [D/2, 2]
            halves = values.reshape(paired, 2, values.shape[0] // paired // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if "conv.conv" in name:
            values = values.squeeze(1)
        plain = values.ndim == 1 or "conv.conv" in name
        kind = Kind.F32 if plain else kind_of(name)
        values = np.ascontiguousarray(values + np.float32(shift))
        blocks = gguf.quants.quantize(values, kind)
        writer.add_tensor(stored, blocks, raw_dtype=kind)
        values = gguf.quants.dequantize(blocks, kind) - np.float32(shift)
        if paired:
            pairs = values.reshape(paired, values.shape[0] // paired // 2, 2, -1)
            values = pairs.swapaxes(1, 2)
        state[name] = torch.from_numpy(np.ascontiguousarray(values)).reshape(parameter.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _write_metadata(writer: Any, architecture: str, config: Any) -> None:
    layers = config.num_hidden_layers
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = config.num_key_value_heads
    if architecture == "lfm2":
        kv_heads = [0 if kind == "conv" else kv_heads for kind in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_head_count_kv(kv_heads)
    if architecture == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim and architecture not in ("chatglm", "granite", "phi3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if architecture in (*PAIRED_ROWS, "chatglm", "glm4", "phi3"):
        part = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_dim * part))
    if architecture != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
        if rope["rope_type"] == "longrope":
            long, short = config.max_position_embeddings, config.original_max_position_embeddings
            scale = math.sqrt(1 + math.log(long / short) / math.log(short))
            writer.add_rope_scaling_attn_factors(scale)
    elif getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "olmo2" and getattr(config, "sliding_window", None):
        writer.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = ["<s>", "</s>", "<pad>", *(chr(ord("A") + at) for at in range(VOCAB - 4)), "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (VOCAB - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)


def rope_factors(config: Any) -> dict[str, np.ndarray]:
    """The tensors beside the weights: by what each frequency of RoPE is divided."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], dtype=np.float32)
            for which in ("long", "short")
        }
    if rope.get("rope_type") == "llama3":
        factors = llama3_factors(config.head_dim, rope["rope_theta"], rope["factor"])
        return {"rope_freqs.weight": factors}
    return {}


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """Those of Llama 3.1."""
    frequencies = 1 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    factors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)
