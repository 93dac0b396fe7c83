"""What differs between releases of transformers, each by its name: the other files ask here.

Every function looks at what is there, not at the version; that says only whether it was tested.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

from torch import nn

from fasttps.models import FAMILIES

# The releases that the tests run on, as major.minor.
TESTED = ("4.57", "5.12", "5.24")
# The names of the argument that is a cache: since 5.24, and before.
CACHE_NAMES = ("cache", "past_key_values")

# What the forward of a class whose name ends so takes, beside the cache.
_FORWARDS = {
    "Attention": ("hidden_states", "position_embeddings", "attention_mask"),
    "DecoderLayer": ("hidden_states", "attention_mask"),  # of Gemma 3, several embeddings in 4.57
    "ForCausalLM": (
        *("input_ids", "attention_mask", "position_ids", "inputs_embeds"),
        *("use_cache", "logits_to_keep"),
    ),
}
# What is called of a cache, and the parameters that it is called with.
_CACHE_METHODS = {
    "update": ("key_states", "value_states"),
    "get_seq_length": (),
    "get_mask_sizes": (),
    "reorder_cache": ("beam_idx",),
}
_told: set[str] = set()


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters, those of the function that decorators wrap."""
    return tuple(inspect.signature(function).parameters)


def cache_argument(forward: Callable[..., Any]) -> str:
    """How this forward calls its cache."""
    names = parameters_of(forward)
    return next(name for name in CACHE_NAMES if name in names)


def cache_field(output: type) -> str:
    """How the output of a model calls its cache."""
    fields = output.__dataclass_fields__  # type: ignore[attr-defined]
    return next(name for name in CACHE_NAMES if name in fields)


def asks_for_attention(attention: type[nn.Module]) -> bool:
    """Whether its forward looks up the attention that the config names; OLMoE's did not in 4.57."""
    return hasattr(sys.modules[attention.__module__], "ALL_ATTENTION_FUNCTIONS")


def slices_by_length(generation: type) -> bool:
    """Whether a length, and not the positions of 4.57, says which ids a step is given."""
    names = parameters_of(generation.prepare_inputs_for_generation)  # type: ignore[attr-defined]
    return "next_sequence_length" in names


def check_release(model: nn.Module) -> str | None:
    """Why this release of transformers does not do, and a warning where it was not tested.

    Only a model that has modules of a family is looked at.
    """
    kinds = {type(module) for module in model.modules()}
    ours = [base for kind in kinds for base in kind.__mro__ if base.__module__ in FAMILIES]
    if not ours:
        return None
    import transformers

    version = transformers.__version__
    differing = next(_differences(set(ours)), None)
    if differing is not None:
        return f"transformers {version} is not as fasttps expects: {differing}"
    if ".".join(version.split(".")[:2]) not in TESTED and version not in _told:
        _told.add(version)
        warnings.warn(
            f"fasttps is not tested with transformers {version}, but with {', '.join(TESTED)}; the "
            "signatures that it rests on are as they should be",
            stacklevel=3,
        )
    return None


def _differences(kinds: Collection[type]) -> Iterator[str]:
    from transformers.cache_utils import CacheLayerMixin

    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        for suffix, wanted in _FORWARDS.items():
            if kind.__name__.endswith(suffix):
                yield from _lacking(f"{kind.__name__}.forward", kind.forward, wanted)  # type: ignore[attr-defined]
                names = parameters_of(kind.forward)  # type: ignore[attr-defined]
                if not set(names) & set(CACHE_NAMES):
                    yield _sentence(f"{kind.__name__}.forward", CACHE_NAMES[:1], names)
        if kind.__name__.endswith("MLP"):
            names = parameters_of(kind.forward)  # type: ignore[attr-defined]
            if len(names) != 2:
                yield _sentence(f"{kind.__name__}.forward", ("self", "x"), names)
    for name, wanted in _CACHE_METHODS.items():
        method = getattr(CacheLayerMixin, name, None)
        if method is None:
            yield f"CacheLayerMixin has no {name}"
        else:
            yield from _lacking(f"CacheLayerMixin.{name}", method, wanted)


def _lacking(what: str, function: Callable[..., Any], wanted: Collection[str]) -> Iterator[str]:
    names = parameters_of(function)
    if not set(wanted) <= set(names):
        yield _sentence(what, wanted, names)


def _sentence(what: str, wanted: Collection[str], got: Collection[str]) -> str:
    return f"{what} wanted parameters {', '.join(wanted)}, got {', '.join(got)}"
