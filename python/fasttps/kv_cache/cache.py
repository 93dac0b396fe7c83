"""`StaticKVCache`: the layers of a model, allocated once and written in place."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fasttps.kv_cache.layer import KEY_DTYPES, StaticKVLayer, cropped
from fasttps.kv_cache.sliding import SlidingKVLayer
from fasttps.kv_cache.steps import Steps

_DTYPES = (*KEY_DTYPES, torch.int8)
_INT64_MAX = 2**63 - 1
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# What transformers keeps itself, a state of fixed size.
_STATE_TYPES = frozenset({"conv", "linear_attention"})
SPARE_SLOTS = 255


class StaticKVCache(Cache):
    """A transformers Cache of [batch, num_kv_heads, max_seq_len, head_dim] buffers.

    For `model.generate(..., past_key_values=cache)` (also `cache=cache` since transformers 5.24),
    of models patched or not, with greedy search, sampling, beams and assisted decoding, and for
    `torch.compile` with one graph. In a patched model RoPE, the write and the attention are one op.

    Memory is taken with the first tokens, in their dtype (float32, bfloat16 or float16) unless
    another is asked for, for their batch, and in full: 2 * layers * batch * num_kv_heads *
    max_seq_len * head_dim elements, and with int8 as many scales as there are rows;
    `reset()` keeps it for the next prompt, if that is of the same batch and dtype. A layer with a
    sliding window keeps that and `spare_slots` more, and layers that are no attention (the
    convolutions of LFM2) keep what transformers keeps for them.

    A step that is broken off (Ctrl-C) leaves no trace in layers of keys and values; with a state or
    a long piece in a ring it may: those want `reset()`, a ring says so.
    """

    def __init__(
        self,
        config: Any,
        max_seq_len: int,
        dtype: torch.dtype | None = None,
        *,
        spare_slots: int = SPARE_SLOTS,
    ) -> None:
        """
        Args:
            config: the model's.
            dtype: what is kept: torch.int8 (each row with a scale; half the bytes of bfloat16),
                or a floating type; None: what the keys are.
            max_seq_len: tokens that fit, prompt and answer together; with assisted decoding or
                prompt lookup the drafts of one step too.
            spare_slots: tokens that a sliding layer keeps beyond its window: `crop` can take so
                many back, and a prompt goes through the layer in pieces of one more.

        Raises:
            ValueError: max_seq_len is not positive or past int64, spare_slots is negative, or a
                layer keeps something that is not known here.
            TypeError: a number is not an integer, or dtype none that can be kept.
        """
        if dtype is not None and dtype not in _DTYPES:
            raise TypeError(
                "StaticKVCache: dtype wanted None, torch.float32, bfloat16, float16 or int8, got "
                f"{dtype}"
            )
        max_seq_len = _integer("max_seq_len", max_seq_len, 1)
        spare_slots = _integer("spare_slots", spare_slots, 0)
        self.max_seq_len = max_seq_len
        kinds = _layer_kinds(config.get_text_config(decoder=True))
        keep_keys = [at for at, (kind, _) in enumerate(kinds) if kind in _ATTENTION_TYPES]
        self._steps = Steps(max(keep_keys, default=0))
        layers: list[Any] = []
        for at, (kind, window) in enumerate(kinds):
            if kind in _STATE_TYPES:
                layers.append(_state_layer(kind))
            elif window is not None and window + spare_slots < max_seq_len:
                layers.append(
                    SlidingKVLayer(
                        max_seq_len, self._steps, at, dtype, window=window, spare_slots=spare_slots
                    )
                )
            else:
                layers.append(StaticKVLayer(max_seq_len, self._steps, at, dtype))
        super().__init__(layers=layers)
        self._rings = [layer for layer in layers if isinstance(layer, SlidingKVLayer)]
        self._is_plain = len(keep_keys) == len(layers)

    @classmethod
    def for_model(cls, model: nn.Module, max_seq_len: int) -> StaticKVCache:
        """A cache that holds what the patch of `model` was asked for as its `kv`."""
        kinds = {module.__dict__["kv"] for module in model.modules() if "kv" in module.__dict__}
        return cls(model.config, max_seq_len, next(iter(kinds), None))

    @property
    def kv_layers(self) -> list[StaticKVLayer]:
        """The layers that keep keys and values."""
        return [layer for layer in self.layers if isinstance(layer, StaticKVLayer)]

    @property
    def _states(self) -> list[Any]:
        """The layers that keep a state."""
        return [layer for layer in self.layers if not isinstance(layer, StaticKVLayer)]

    def step_start(
        self,
        batch: int,
        new_tokens: int,
        windows: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> int | None:
        """Tokens in the cache, if an op can append such keys to all layers, of these windows."""
        layers: Any = self.layers
        if self._steps.differ or not self._is_plain:
            return None
        if not layers[0].takes(batch, num_kv_heads, head_dim, dtype):
            return None
        if self._rings and not all(
            layer.takes_step(window, new_tokens) for layer, window in zip(layers, windows)
        ):
            return None
        start = self._steps.length
        return start if start + new_tokens <= self.max_seq_len else None

    def begin_step(self, new_tokens: int) -> Tensor:
        """The lengths that an op takes, which is about to append to every layer.

        Raises:
            ValueError: a sliding layer has lost tokens of its window.
        """
        for ring in self._rings:
            ring.begin(new_tokens)
        return self._steps.seq_lens

    def step_buffers(self) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None, Any]:
        """Keys, values and, of an int8 cache, their scales, each a list over the layers."""
        layers: Any = self.layers
        scales = layers[0].k_scale is not None
        return (
            [layer.keys for layer in layers],
            [layer.values for layer in layers],
            [layer.k_scale for layer in layers] if scales else None,
            [layer.v_scale for layer in layers] if scales else None,
        )

    def step_entries(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Where the layers keep what `step_buffers` gives: dict, key, tensor."""
        return [
            (vars(layer), name, getattr(layer, name))
            for layer in self.layers
            for name in ("keys", "values", "k_scale", "v_scale")
            if name in vars(layer)
        ]

    @property
    def seq_lens(self) -> Tensor:
        """Tokens in the cache as the ops take them: int64 [], [batch] after `set_seq_lens`."""
        return self._steps.seq_lens

    def end_step(self, new_tokens: int) -> None:
        """Count `new_tokens` more in every layer; they were written by an op."""
        self._steps.seq_lens.add_(new_tokens)

    def set_seq_lens(self, seq_lens: Tensor) -> None:
        """Give each sequence a length of its own: what lies past it counts for nothing.

        For prompts that are padded on the right: call the model, then say how many tokens of each
        are real, and go on token by token with position_ids that say the same. For patched models,
        without an attention mask.

        Args:
            seq_lens: int64 [batch], at most the tokens in the cache.

        Raises:
            ValueError: it is none of those, or a sliding layer has lost tokens of the window.
        """
        batch = self.kv_layers[0].batch_size if self.is_initialized else 0
        filled = self._steps.length
        if self._states:
            raise ValueError("StaticKVCache: set_seq_lens wanted attention layers only")
        if seq_lens.dtype != torch.int64 or seq_lens.shape != (batch,):
            raise ValueError(
                f"StaticKVCache: seq_lens wanted int64 [{batch}], got {seq_lens.dtype} "
                f"{list(seq_lens.shape)}"
            )
        if int(seq_lens.min()) < 0 or int(seq_lens.max()) > filled:
            raise ValueError(
                f"StaticKVCache: seq_lens wanted 0 to the {filled} tokens in the cache, got "
                f"{seq_lens.tolist()}"
            )
        for layer in self.kv_layers:
            layer.check_crop(int(seq_lens.min()))
        self._steps.replace(seq_lens)

    def grow(self, max_seq_len: int) -> None:
        """Make room for more tokens; what is in the cache stays, in new memory.

        Raises:
            ValueError, TypeError: max_seq_len is no integer or less than now.
        """
        max_seq_len = _integer("max_seq_len", max_seq_len, self.max_seq_len)
        for layer in self.kv_layers:
            layer.grow(max_seq_len)
        self.max_seq_len = max_seq_len

    def crop(self, tokens: int) -> None:
        """Negative: remove so many of the last tokens. Positive: keep so many of the first.

        0 changes nothing. (transformers asks for the former since 5.18, for the latter before.)

        Raises:
            ValueError: a sliding layer has lost what is wanted; nothing was changed.
            RuntimeError: a layer that keeps a state does not record its past.
        """
        filled = self._steps.length
        length = cropped(filled, tokens)
        for layer in self.kv_layers:
            layer.check_crop(length)
        for state in self._states:
            state.crop(length - filled)
        if self._steps.differ:
            self._steps.replace(self._steps.seq_lens.clamp(max=length))
        else:
            self._steps.set(length)

    def reset(self) -> None:
        """Forget all tokens; the memory stays for the next prompt."""
        self._steps.set(0)
        for at, layer in enumerate(self.layers):
            if not isinstance(layer, StaticKVLayer):
                self.layers[at] = type(layer)(number_of_states=layer.number_of_states)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        super().reorder_cache(beam_idx)
        self._replace_lengths(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times, one after the other."""
        self._replace_batch(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` (numbers or a bool mask)."""
        self._replace_batch(lambda rows: rows[indices])

    def _replace_batch(self, choose: Callable[[Tensor], Tensor]) -> None:
        for layer in self.kv_layers:
            layer.replace_batch(choose)
        for state in self._states:
            for held in (state.conv_states, state.recurrent_states):
                for at, rows in held.items():
                    held[at] = None if rows is None else choose(rows)
        self._replace_lengths(choose)

    def _replace_lengths(self, choose: Callable[[Tensor], Tensor]) -> None:
        if self._steps.differ:
            self._steps.replace(choose(self._steps.seq_lens))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is in the cache to a safetensors file; see `load_from`."""
        from fasttps.kv_cache.file import save_cache

        save_cache(self, path)

    def load_from(self, path: str | os.PathLike[str]) -> None:
        """Take what `save` wrote in the place of what is in the cache.

        For a prompt that many answers begin with. The cache is one of the same model, with room.

        Raises:
            ValueError: the file is none of a cache like this one, or has too many tokens. Nothing
                was changed.
            OSError: it cannot be read.
        """
        from fasttps.kv_cache.file import load_cache

        load_cache(self, path)

    @property
    def is_initialized(self) -> bool:
        """Whether the layers of keys and values have their memory."""
        return all(layer.is_initialized for layer in self.kv_layers)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The name of `get_max_length` before transformers 5.21."""
        return self.max_seq_len

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that fit."""
        return self.max_seq_len

    def __repr__(self) -> str:
        return (
            f"StaticKVCache({len(self.layers)} layers, {self._steps.length} of "
            f"{self.max_seq_len} tokens)"
        )


def _integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"StaticKVCache: {name} wanted an int, got {type(value).__name__}")
    value = operator.index(value)
    if not least <= value <= _INT64_MAX:
        raise ValueError(
            f"StaticKVCache: {name} wanted at least {least} and at most {_INT64_MAX}, got {value}"
        )
    return value


def _layer_kinds(config: Any) -> list[tuple[str, int | None]]:
    """What each layer is, by transformers' name, and the window of a sliding one."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kind = "full_attention" if window is None else "sliding_attention"
        kinds = [kind] * config.num_hidden_layers
    other = set(kinds) - _ATTENTION_TYPES - _STATE_TYPES
    if other:
        raise ValueError(
            f"StaticKVCache: config wanted layers of {sorted(_ATTENTION_TYPES | _STATE_TYPES)}, "
            f"got {sorted(other)}"
        )
    # The last layers of some models use the keys and values of earlier ones.
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    return [(kind, window if kind == "sliding_attention" else None) for kind in kinds[:own]]


def _state_layer(kind: str) -> Any:
    """transformers' layer for a kind that keeps a state."""
    from transformers import cache_utils

    made = getattr(cache_utils, "STATIC_LAYER_TYPE_MAPPING", {}).get(kind)
    if made is None:
        raise ValueError(
            f"StaticKVCache: layers of {kind!r} want transformers 5.24 or later; use its own cache"
        )
    return made()
