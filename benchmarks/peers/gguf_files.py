"""GGUF files of the shared weights, all matrices in one type. Needs numpy and gguf, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.peer import Job

TYPES = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
CHUNK_ROWS = 8192  # quantised at once, so that their float32 copy stays small

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_file(job: Job) -> Path:
    """The file of the job's weights, made on the first call."""
    if job.bits == "file":
        if job.gguf is None:
            raise ValueError("this model did not come as a GGUF file")
        return job.gguf
    path = job.folder / f"model-{TYPES[job.bits]}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        write(job.folder, part, TYPES[job.bits])
        part.replace(path)
    return path


def matrix_bytes(path: Path) -> int:
    """Bytes of the matrices that one token reads."""
    import gguf

    tensors = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(path).tensors if len(t.shape) == 2}
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    return sum(tensors.values())


def bf16_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of a safetensors file, each as uint16."""
    import numpy

    raw = numpy.memmap(path, numpy.uint8, "r")
    header_bytes = int(raw[:8].view(numpy.uint64)[0])
    header = json.loads(bytes(raw[8 : 8 + header_bytes]))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} wanted BF16, got {entry['dtype']}")
        begin, end = (8 + header_bytes + at for at in entry["data_offsets"])
        yield name, raw[begin:end].copy().view(numpy.uint16).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleave_halves(rows: Any, heads: int) -> Any:
    """RoPE pairs (i, i + d/2) of each head become (2i, 2i + 1), as the format's Llama has them."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def write(folder: Path, path: Path, type_name: str) -> None:
    """The folder's weights as one GGUF file."""
    import gguf
    import numpy

    config = json.loads((folder / "config.json").read_text())
    kind = gguf.GGMLQuantizationType[type_name]
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    add_config(writer, config, gguf.LlamaFileType[f"MOSTLY_{type_name}"])
    add_vocabulary(writer, config["vocab_size"])

    def float32(rows: Any) -> Any:
        return (rows.astype(numpy.uint32) << 16).view(numpy.float32)

    for source, rows in bf16_tensors(folder / "model.safetensors"):
        name = gguf_name(source)
        if rows.ndim == 1:
            writer.add_tensor(name, float32(rows))
            continue
        for part, count in heads.items():
            if f".{part}." in name:
                rows = interleave_halves(rows, count)
        rows = numpy.ascontiguousarray(rows)
        if type_name == "BF16":
            stored = rows.view(numpy.uint8)
        else:
            parts = (rows[at : at + CHUNK_ROWS] for at in range(0, len(rows), CHUNK_ROWS))
            stored = numpy.concatenate([gguf.quants.quantize(float32(p), kind) for p in parts])
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_config(writer: Any, config: dict[str, Any], file_type: Any) -> None:
    writer.add_name("random weights")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)


def add_vocabulary(writer: Any, vocab_size: int) -> None:
    """Tokens that readers accept; only ids are ever used."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256  # unknown, control, byte
    tokens += [f"tok{at}" for at in range(vocab_size - len(tokens))]
    types += [1] * (len(tokens) - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_scores([-float(at) for at in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
