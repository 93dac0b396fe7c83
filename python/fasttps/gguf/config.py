"""The config of transformers for the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from fasttps.gguf.architectures import Draft, architecture_of, layer_count
from fasttps.gguf.header import BrokenGguf, Header, UnsupportedGguf
from fasttps.gguf.keys import Keys
from fasttps.gguf.rope import rope_parameters

TOKENS = "tokenizer.ggml."
# Parts of a head that another class than Llama's leaves without RoPE.
PARTIAL_ROPE = ("phi3", "chatglm", "glm4")
# Whether projections have biases is in the config of these alone.
BIASES = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen3": ("attention_bias",),
    "chatglm": ("attention_bias",),
    "glm4": ("attention_bias",),
    "granite": ("attention_bias", "mlp_bias"),
    "olmo2": ("attention_bias",),
    "smollm3": ("attention_bias", "mlp_bias"),
    "starcoder2": ("attention_bias",),
}


def model_config(header: Header, factors: dict[str, list[float]]) -> tuple[str, Any]:
    """The name of a file's class in transformers, and its config.

    factors: the values of the tensors of `rope.FACTORS` that the file has.

    Raises:
        UnsupportedGguf: another architecture, or a kind of it that transformers has no class for.
        BrokenGguf: a key is missing or makes no sense.
    """
    import transformers

    if not hasattr(transformers.LlamaConfig(), "rope_parameters"):
        raise UnsupportedGguf(
            f"is read with transformers 5 or later, this is {transformers.__version__}"
        )
    architecture = architecture_of(header.architecture)
    if (files := Keys(header.metadata, "split.").get("count", 1)) != 1:
        raise UnsupportedGguf(f"is one of {files} files of a model; join them into one first")
    read = Keys(header.metadata, f"{header.architecture}.")
    draft = Draft(architecture.model, _common(header, read, factors))
    architecture.complete(draft, read)
    made: Any = getattr(transformers, draft.model, None)
    if made is None:
        raise UnsupportedGguf(f"is a {draft.model}, which this version of transformers has not")
    try:
        config = made.config_class(**draft.values)
    except Exception as error:  # each config checks its own fields, and raises its own errors
        raise BrokenGguf(f"has metadata that make no {draft.model}: {error}") from error
    config.eos_token_id = draft.values["eos_token_id"]  # some put their own for none
    return draft.model, config


def end_tokens(header: Header) -> list[int]:
    """Ids that end an answer: of the text, of a turn, of a message."""
    tokens = Keys(header.metadata, TOKENS)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (tokens.token(key, _vocab_size(header)) for key in keys)
    return list(dict.fromkeys(token for token in ids if token is not None))


def _vocab_size(header: Header) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BrokenGguf("has no matrix token_embd.weight")
    return embedding.shape[0]


def _common(header: Header, read: Keys, factors: dict[str, list[float]]) -> dict[str, Any]:
    """What the configs of all architectures have."""
    tensors, name = header.tensors, header.architecture
    read.refuse("expert_count")
    layers = read.count("block_count")
    # Before a module is made for each: a file of some bytes may state two billion layers.
    if (there := layer_count(tensors)) != layers:
        raise BrokenGguf(f"has {there} of the {layers} layers that it states")
    heads, hidden = read.count("attention.head_count"), read.count("embedding_length")
    # Of LFM2's layers only some attend, and the others have no heads.
    kv_heads = (
        max(read.per_layer("attention.head_count_kv", layers)) or heads
        if name == "lfm2"
        else read.count("attention.head_count_kv", heads)
    )
    head_dim = read.count("attention.key_length", hidden // heads or 1)
    if heads % kv_heads or hidden % heads or head_dim % 2:
        raise BrokenGguf(
            f"has {heads} heads of {head_dim} and {kv_heads} kv heads in a width of {hidden}"
        )
    rotary_dim = read.count("rope.dimension_count", head_dim)
    value_dim = read.count("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedGguf(f"has heads of {head_dim} for keys and of {value_dim} for values")
    if rotary_dim != head_dim and name not in PARTIAL_ROPE:
        raise UnsupportedGguf(f"has {name}.rope.dimension_count = {rotary_dim}, heads {head_dim}")
    if rotary_dim > head_dim or rotary_dim % 2:
        raise BrokenGguf(f"rotates {rotary_dim} elements of heads of {head_dim}")
    context = read.count("context_length")
    rope = rope_parameters(read, factors, rotary_dim, context)
    if name in PARTIAL_ROPE:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    vocab_size = _vocab_size(header)
    tokens = Keys(header.metadata, TOKENS)
    eps = "layer_norm_epsilon" if name == "starcoder2" else "layer_norm_rms_epsilon"
    biases = {
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": read.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": read.positive(f"attention.{eps}"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": tokens.token("bos_token_id", vocab_size),
        "eos_token_id": tokens.token("eos_token_id", vocab_size),
        "pad_token_id": tokens.token("padding_token_id", vocab_size),
        **{key: biases[key] for key in BIASES.get(name, ())},
    }
