"""A KV cache that is allocated once and written in place, for transformers' models."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from fasttps import ops
from fasttps.memory import empty_in_huge_pages

_KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = (*_KEY_DTYPES, torch.int8)
_INT64_MAX = 2**63 - 1
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


class Steps:
    """How many tokens each layer holds, and the `seq_lens` of all of them: one int64 tensor.

    A step takes the layers one by one. One that is broken off (Ctrl-C) leaves some of them ahead;
    what those have more counts for nothing, and the next step begins where all layers are.
    """

    def __init__(self, num_layers: int) -> None:
        self.filled = [0] * num_layers
        self._start = 0  # what every layer had before the present step
        self._tensor: Tensor | None = None
        self._value = -1  # that of the tensor; -1 while it is unknown

    def start(self, layer: int) -> int:
        """Tokens before the step in which `layer` comes next."""
        if self.filled[layer] != self._start:
            self.settle()
        return self._start

    def settle(self) -> None:
        """Forget what a broken off step left in some of the layers."""
        self._start = min(self.filled, default=0)
        self.filled = [self._start] * len(self.filled)

    def seq_lens(self, value: int, device: torch.device) -> Tensor:
        """The tensor, holding `value`; rewritten when the first layer steps on."""
        if self._tensor is None or self._tensor.device != device:
            with torch.inference_mode(False):
                self._tensor = torch.tensor(value, device=device)
        elif value != self._value:
            self._value = -1
            self._tensor.fill_(value)
        self._value = value
        return self._tensor


class StaticKVLayer(CacheLayerMixin):
    """One layer of a StaticKVCache.

    Attributes:
        keys, values: [batch, num_kv_heads, max_seq_len, head_dim], of the cache's dtype or else
            that of the first keys; None before those came.
        k_scale, v_scale: float32 [batch, num_kv_heads, max_seq_len] of an int8 cache, else None.
        filled: tokens in the layer; slots from there on hold nothing of meaning. The cache's
            length is that of the layer with the fewest.
    """

    # False, with views of the filled part returned: transformers then drops the mask of a single
    # token, which is right for these views and would be wrong for the whole buffers.
    is_compileable = False
    is_croppable = True
    is_sliding = False

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __init__(
        self, max_seq_len: int, steps: Steps, index: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._wanted_dtype = dtype
        self.max_seq_len = max_seq_len
        self.max_cache_len = max_seq_len  # transformers' name
        self._steps = steps
        self._index = index
        self._kind: tuple[Any, ...] | None = None  # the arguments of the last _allocate

    @property
    def filled(self) -> int:
        return self._steps.filled[self._index]

    @filled.setter
    def filled(self, tokens: int) -> None:
        self._steps.filled[self._index] = tokens

    def reserve(self, key: Tensor, value: Tensor) -> Tensor:
        """Make sure that the rows of key and value fit; the caller writes them and adds to filled.

        key, value: [batch, new_tokens, num_kv_heads, head_dim]. Memory for others is given up if
        nothing is in it.

        Returns:
            `seq_lens`, the slot of the first new row.

        Raises:
            ValueError: there is no room for them, or others are in the cache.
            TypeError: their dtype cannot be kept. Nothing was written.
        """
        start = self._steps.start(self._index)
        wanted = start + key.size(1)
        if wanted > self.max_seq_len:
            raise ValueError(
                f"StaticKVCache: max_seq_len wanted at least {wanted} ({start} tokens are in "
                f"the cache, {key.size(1)} come), got {self.max_seq_len}; make a larger one, "
                "StaticKVCache(config, max_seq_len=...), for the prompt and all new tokens, with "
                "speculative decoding for the drafts too"
            )
        kind = (key.size(0), key.size(2), key.size(3), value.size(3), key.dtype, key.device)
        if kind != self._kind:
            if start > 0:
                raise ValueError(
                    "StaticKVCache: key wanted (batch, num_kv_heads, head_dim, v_head_dim, dtype, "
                    f"device) = {self._kind} like the {start} tokens in the cache, got {kind}; "
                    "reset() makes room for another prompt"
                )
            self._allocate(*kind)
        return self._steps.seq_lens(start, key.device)

    def takes(self, batch: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether the buffers are there, for keys and values like these."""
        return self._kind is not None and self._kind[:5] == (
            batch,
            num_kv_heads,
            head_dim,
            head_dim,
            dtype,
        )

    def _allocate(
        self,
        batch: int,
        num_kv_heads: int,
        k_head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if dtype not in _KEY_DTYPES:
            raise TypeError(f"StaticKVCache: key wanted float32, bfloat16 or float16, got {dtype}")
        held = self._wanted_dtype or dtype
        slots = (batch, num_kv_heads, self.max_seq_len)
        k_scale = v_scale = None
        # Not inference tensors, so that a cache filled in inference mode can be used outside.
        with torch.inference_mode(False):
            keys = empty_in_huge_pages((*slots, k_head_dim), held, device)
            values = empty_in_huge_pages((*slots, v_head_dim), held, device)
            if held == torch.int8:
                k_scale = torch.empty(slots, dtype=torch.float32, device=device)
                v_scale = torch.empty(slots, dtype=torch.float32, device=device)
        self.keys, self.values = keys, values
        self.k_scale, self.v_scale = k_scale, v_scale
        self.dtype, self.device = held, device
        self._kind = (batch, num_kv_heads, k_head_dim, v_head_dim, dtype, device)
        self.batch_size = self.max_batch_size = batch
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate for keys [batch, num_kv_heads, any, head_dim] like these."""
        batch, num_kv_heads, _, head_dim = key_states.shape
        v_head_dim = head_dim if value_states is None else value_states.size(3)
        self._allocate(
            batch, num_kv_heads, head_dim, v_head_dim, key_states.dtype, key_states.device
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append rotated keys and values [batch, num_kv_heads, new_tokens, head_dim].

        Returns:
            All keys and values that are in the cache now, in the dtype of the new ones: views
            where that is the cache's.
        """
        dtype = key_states.dtype
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        seq_lens = self.reserve(key, value)
        if self.k_scale is None:
            key, value = key.to(self.dtype), value.to(self.dtype)
        ops.kv_cache_update_(
            self.keys,
            self.values,
            key,
            value,
            seq_lens,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        self.filled += key.size(1)
        return self._filled(self.keys, self.k_scale, dtype), self._filled(
            self.values, self.v_scale, dtype
        )

    def _filled(self, buffer: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        rows = buffer[:, :, : self.filled]
        if scale is not None:
            rows = rows * scale[:, :, : self.filled, None]
        return rows.to(dtype)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Keys that a mask covers, and the position of the first."""
        new_tokens = query_length.size(0) if isinstance(query_length, Tensor) else query_length
        return self.get_seq_length() + new_tokens, 0

    def get_seq_length(self) -> int:
        return min(self._steps.filled)

    def get_max_length(self) -> int:
        return self.max_seq_len

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.21."""
        return self.max_seq_len

    def reset(self) -> None:
        """Forget all tokens; the memory stays for the next prompt."""
        self.filled = 0

    def crop(self, tokens: int) -> None:
        """Negative: remove so many of the last tokens. Positive: keep so many of the first.

        0 changes nothing. (transformers asks for the former since 5.18, for the latter before.)
        """
        if tokens < 0:
            self.filled = max(0, self.filled + tokens)
        elif tokens > 0:
            self.filled = min(self.filled, tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        if not self.is_initialized:
            return
        if beam_idx.numel() != self.batch_size:
            self._replace_batch(lambda filled: filled.index_select(0, beam_idx))
            return
        for buffer in self._buffers():
            filled = buffer[:, :, : self.filled]
            filled.copy_(filled.index_select(0, beam_idx.to(buffer.device)))

    def _buffers(self) -> list[Tensor]:
        """All that hold a slot a token, [batch, num_kv_heads, max_seq_len, ...]."""
        buffers = (self.keys, self.values, self.k_scale, self.v_scale)
        return [buffer for buffer in buffers if buffer is not None]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times, one after the other."""
        self._replace_batch(lambda filled: filled.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` (numbers or a bool mask)."""
        self._replace_batch(lambda filled: filled[indices])

    def _replace_batch(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Move the filled rows of other sequences into new buffers."""
        if not self.is_initialized:
            return
        chosen = [choose(buffer[:, :, : self.filled]) for buffer in self._buffers()]
        assert self._kind is not None
        self._allocate(chosen[0].size(0), *self._kind[1:])
        for buffer, rows in zip(self._buffers(), chosen):
            buffer[:, :, : self.filled].copy_(rows)

    def __repr__(self) -> str:
        return f"StaticKVLayer({self.filled} of {self.max_seq_len})"


class StaticKVCache(Cache):
    """A transformers Cache of [batch, num_kv_heads, max_seq_len, head_dim] buffers.

    For `model.generate(..., past_key_values=cache)` (also `cache=cache` since transformers 5.24),
    of models patched or not, with greedy search, sampling, beams and assisted decoding. In a
    patched model RoPE, the write and the attention are one op.

    Memory is taken with the first tokens, in their dtype (float32, bfloat16 or float16) unless
    another is asked for, for their batch, and in full: 2 * layers * batch * num_kv_heads *
    max_seq_len * head_dim elements, and with int8 as many scales as there are rows;
    `reset()` keeps it for the next prompt, if that is of the same batch and dtype. A layer with a
    sliding window keeps all tokens too.
    """

    def __init__(self, config: Any, max_seq_len: int, dtype: torch.dtype | None = None) -> None:
        """
        Args:
            config: the model's.
            dtype: what is kept: torch.int8 (each row with a scale; half the bytes of bfloat16),
                or a floating type; None: what the keys are.
            max_seq_len: tokens that fit, prompt and answer together; with assisted decoding or
                prompt lookup the drafts of one step too.

        Raises:
            ValueError: max_seq_len is not positive or past int64, or a layer keeps something
                other than keys and values.
            TypeError: max_seq_len is not an integer, or dtype none that can be kept.
        """
        if dtype is not None and dtype not in _DTYPES:
            raise TypeError(
                "StaticKVCache: dtype wanted None, torch.float32, bfloat16, float16 or int8, got "
                f"{dtype}"
            )
        if isinstance(max_seq_len, bool) or not hasattr(max_seq_len, "__index__"):
            raise TypeError(
                f"StaticKVCache: max_seq_len wanted an int, got {type(max_seq_len).__name__}"
            )
        max_seq_len = operator.index(max_seq_len)
        if not 1 <= max_seq_len <= _INT64_MAX:
            raise ValueError(
                f"StaticKVCache: max_seq_len wanted at least 1 and at most {_INT64_MAX}, got "
                f"{max_seq_len}"
            )
        config = config.get_text_config(decoder=True)
        other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if other:
            raise ValueError(
                f"StaticKVCache: config wanted attention layers only, got {sorted(other)}"
            )
        self.max_seq_len = max_seq_len
        # The last layers of some models use the keys and values of earlier ones.
        num_layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
        self._steps = Steps(num_layers)
        super().__init__(
            layers=[StaticKVLayer(max_seq_len, self._steps, at, dtype) for at in range(num_layers)]
        )

    @classmethod
    def for_model(cls, model: nn.Module, max_seq_len: int) -> StaticKVCache:
        """A cache that holds what the patch of `model` was asked for as its `kv`."""
        kinds = {module.__dict__["kv"] for module in model.modules() if "kv" in module.__dict__}
        return cls(model.config, max_seq_len, next(iter(kinds), None))

    def step_start(
        self, batch: int, new_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int | None:
        """Tokens in the cache, if it is one of such keys and has room for more of them."""
        if not self.layers[0].takes(batch, num_kv_heads, head_dim, dtype):
            return None
        self._steps.settle()
        start = self._steps.filled[0]
        return start if start + new_tokens <= self.max_seq_len else None

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

    def step_seq_lens(self, start: int) -> Tensor:
        """`start` as the ops take it."""
        return self._steps.seq_lens(start, self.layers[0].device)

    def end_step(self, new_tokens: int) -> None:
        """Count `new_tokens` more in every layer; they were written by an op."""
        self._steps.filled = [tokens + new_tokens for tokens in self._steps.filled]

    def crop(self, tokens: int) -> None:
        """Negative: remove so many of the last tokens. Positive: keep so many of the first."""
        self._steps.settle()
        super().crop(tokens)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The name of `get_max_length` before transformers 5.21."""
        return self.max_seq_len

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that fit."""
        return self.max_seq_len

    def __repr__(self) -> str:
        return (
            f"StaticKVCache({len(self.layers)} layers, {self.get_seq_length()} of "
            f"{self.max_seq_len} tokens)"
        )
