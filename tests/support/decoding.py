"""Ways to decode with a model of transformers and a cache of one's choice, as functions.

Each takes (model, make_cache) and returns token ids; `make_cache(room)` gives `generate`'s options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from tests.support.llama import generate, left_padded, prompt

MakeCache = Callable[[int], dict[str, Any]]
LONG = {"max_new_tokens": 48, "min_new_tokens": 48}
SHORT = {"max_new_tokens": 16, "min_new_tokens": 16}


def greedy(model: Any, make_cache: MakeCache) -> Tensor:
    return generate(model, prompt(1, 20), **LONG, **make_cache(68))


def left_padded_batch(model: Any, make_cache: MakeCache) -> Tensor:
    inputs = left_padded(prompt(3, 13), [0, 4, 11])
    return generate(model, inputs, **LONG, **make_cache(61))


def beams(model: Any, make_cache: MakeCache) -> Tensor:
    inputs = left_padded(prompt(2, 9), [0, 3])
    options = {"num_beams": 3, "num_return_sequences": 2}
    return generate(model, inputs, **options, **LONG, **make_cache(57))


def chunked_prefill(model: Any, make_cache: MakeCache) -> Tensor:
    return generate(model, prompt(2, 20), prefill_chunk_size=6, **LONG, **make_cache(68))


def sampling(model: Any, make_cache: MakeCache) -> Tensor:
    torch.manual_seed(5)
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "num_return_sequences": 3}
    return generate(model, prompt(1, 9), **options, **SHORT, **make_cache(25))


def prompt_lookup(model: Any, make_cache: MakeCache) -> Tensor:
    """Repeats, so that there is something to look up."""
    ids = prompt(1, 5).repeat(1, 4)
    return generate(model, ids, prompt_lookup_num_tokens=3, **SHORT, **make_cache(40))


def assisted(model: Any, make_cache: MakeCache) -> Tensor:
    """By a draft of the same class that is often right."""
    return generate(model, prompt(1, 9), assistant_model=model.draft, **SHORT, **make_cache(60))


def conversation(model: Any, make_cache: MakeCache) -> Tensor:
    """A second question on the cache of the first, of which some is taken back."""
    options = {**make_cache(60)}
    first = generate(model, prompt(1, 9), return_dict_in_generate=True, **SHORT, **options)
    cache = getattr(first, "cache", None) or first.past_key_values
    follow = torch.cat((first.sequences, prompt(1, 5, seed=2)), dim=1)
    return generate(model, follow, **SHORT, cache=cache)


def processors(model: Any, make_cache: MakeCache) -> Tensor:
    class Forbid(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores = scores.clone()
            scores[:, 1::2] = -torch.inf  # odd tokens
            return scores

    options = {"logits_processor": [Forbid()], "repetition_penalty": 1.3, **SHORT}
    return generate(model, prompt(2, 9), **options, **make_cache(25))


def streamer(model: Any, make_cache: MakeCache) -> Tensor:
    class Collect(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.pieces: list[Tensor] = []

        def put(self, value: Tensor) -> None:
            self.pieces.append(value.reshape(-1))

        def end(self) -> None:
            pass

    collect = Collect()
    generate(model, prompt(1, 9), streamer=collect, **SHORT, **make_cache(25))
    return torch.cat(collect.pieces)


MODES = {
    mode.__name__: mode
    for mode in (
        greedy,
        left_padded_batch,
        beams,
        chunked_prefill,
        sampling,
        prompt_lookup,
        assisted,
        conversation,
        processors,
        streamer,
    )
}
