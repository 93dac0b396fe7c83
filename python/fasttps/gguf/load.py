"""`fasttps.load_gguf`: a GGUF file as a model of transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fasttps.gguf.architectures import architecture_of
from fasttps.gguf.config import end_tokens, model_config
from fasttps.gguf.header import BrokenGguf, Header, UnsupportedGguf, read_header
from fasttps.gguf.tensors import Tensors, rope_factors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LoadedGguf(NamedTuple):
    """A model of transformers in eval mode, its PreTrainedTokenizerFast, and the patch in force.

    `patch.undo()` gives the model the file's weights dequantised, read from the file once more;
    None where the model was loaded so.
    """

    model: Any
    tokenizer: Any
    patch: Any


# What `load_gguf` calls as it advances: tensors done, tensors in all, the name of the one done.
Progress = Callable[[int, int, str], None]


def load_gguf(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    pack: bool = True,
    kv: str | None = None,
    int8_activation: bool = True,
    progress: Progress | None = None,
) -> LoadedGguf:
    """Load a GGUF file, patched, its quantised weights as they are.

    Architectures: see `fasttps.gguf.architectures.ARCHITECTURES`. In linears, blocks of Q4_0, Q4_1,
    Q8_0, Q4_K and Q6_K are repacked bit for bit; those of other types are dequantised and packed
    in `dtype` where a patch covers them. Nothing is fetched, and nothing in the file is trusted.

    Args:
        dtype: float32, bfloat16 or float16: of activations, norms and whatever is not quantised.
        pack: False: dequantise everything, as transformers does, and patch nothing.
        kv: what `StaticKVCache.for_model` makes the cache of: "bf16", "int8", or None: `dtype`.
        int8_activation: products with quantised weights round the activations to int8 in groups
            of 32, which is much faster.
        progress: called after each tensor with (tensors done, tensors in all, its name).

    Raises:
        BrokenGguf: the file is cut short, or its parts do not fit together; a ValueError.
        UnsupportedGguf: it is whole, and not of a kind that is read; a ValueError.
        OSError: it cannot be read.
    """
    if dtype not in DTYPES:
        raise TypeError(f"load_gguf: dtype wanted float32, bfloat16 or float16, got {dtype}")
    if not pack and kv is not None:
        raise ValueError(f"load_gguf: kv wanted None with pack=False, got {kv!r}")
    path = Path(path)
    how = How(dtype, pack, kv, int8_activation)
    return load_with(path, read_header(path), how, progress)


@dataclass(frozen=True)
class How:
    """The options of `load_gguf`."""

    dtype: torch.dtype
    pack: bool = True
    kv: str | None = None
    int8_activation: bool = True


def load_with(path: Path, header: Header, how: How, progress: Progress | None) -> LoadedGguf:
    """`load_gguf` of a file whose header has been read, and whose metadata are taken from it."""
    from fasttps.gguf.tokenizer import tokenizer  # here: it imports transformers
    from fasttps.models.obstacles import return_freed_memory

    model, tensors = _empty_model(path, header)
    words = tokenizer(header)
    header.metadata.clear()  # a hundred thousand strings, which have served
    return_freed_memory()
    model.eval()
    patch = None
    if how.pack:
        from fasttps.gguf.pack import pack_model

        patch = pack_model(
            model,
            tensors,
            how.dtype,
            kv=how.kv,
            int8_activation=how.int8_activation,
            progress=progress,
        )
    else:
        fill(model, tensors, how.dtype, progress)
    model.config.dtype = how.dtype
    return LoadedGguf(model, words, patch)


def open_file(path: Path, header: Header) -> tuple[str, Any, Tensors]:
    """The name of a file's class in transformers, its config, and its tensors.

    Raises:
        BrokenGguf, UnsupportedGguf: as `load_gguf`.
    """
    model, config = model_config(header, rope_factors(path, header))
    return model, config, Tensors(path, header, architecture_of(header.architecture), config)


def _empty_model(path: Path, header: Header) -> tuple[Any, Tensors]:
    """The model on the meta device but for its buffers, and the tensors, which fit it."""
    import transformers

    name, config, tensors = open_file(path, header)

    def make(part: Any) -> Any:
        try:
            return part(config)
        except Exception as error:  # each class checks its config in its own way, or does not
            raise BrokenGguf(f"has metadata that make no {name}: {error}") from error

    with torch.device("meta"):
        model = make(getattr(transformers, name))
    tensors.check_fits({name: tuple(weight.shape) for name, weight in model.named_parameters()})
    decoder = model.model
    decoder.rotary_emb = make(type(decoder.rotary_emb))
    if "sliding_attention" in config.rope_parameters and not hasattr(
        decoder.rotary_emb, "sliding_attention_inv_freq"
    ):
        raise UnsupportedGguf(f"is a {name}, of which this version of transformers has one RoPE")
    if hasattr(decoder.embed_tokens, "embed_scale"):
        decoder.embed_tokens.embed_scale = torch.tensor(decoder.embed_tokens.scalar_embed_scale)
    for key, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UnsupportedGguf(f"is a {name} whose {key} this version of FastTPS cannot make")
    if len(ends := end_tokens(header)) > 1:
        model.generation_config.eos_token_id = ends
    return model, tensors


def fill(model: Any, tensors: Tensors, dtype: torch.dtype, progress: Progress | None) -> None:
    """Give the parameters their values, dequantised."""
    for done, parameter in enumerate(tensors.places, start=1):
        module_name, _, kind = parameter.rpartition(".")
        values = nn.Parameter(tensors.values(parameter).to(dtype))
        setattr(model.get_submodule(module_name), kind, values)
        if progress is not None:
            progress(done, len(tensors.places), parameter)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
