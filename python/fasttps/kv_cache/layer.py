"""One layer of a StaticKVCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from fasttps import ops
from fasttps.kv_cache.steps import Steps
from fasttps.memory import empty_in_huge_pages

KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StaticKVLayer(CacheLayerMixin):
    """A layer whose queries may see every token.

    Attributes:
        keys, values: [batch, num_kv_heads, slots, head_dim], of the cache's dtype or else that of
            the first keys; None before those came. Here slots are max_seq_len.
        k_scale, v_scale: float32 [batch, num_kv_heads, slots] of an int8 cache, else None.
    """

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
        self.steps = steps
        self._index = index
        self._kind: tuple[Any, ...] | None = None  # the arguments of the last _allocate

    @property
    def is_compileable(self) -> bool:
        """Whether masks and keys cover every slot: within a graph, whose shapes must stay.

        Elsewhere they cover what is filled, and transformers then drops the mask of a single token.
        """
        return torch.compiler.is_compiling()

    @property
    def slots(self) -> int:
        """Tokens for which there is memory."""
        return self.max_seq_len

    @property
    def kind(self) -> str:
        """What another layer must agree in to take this one's rows."""
        return f"{type(self).__name__} of {self._wanted_dtype or 'what the keys are'}"

    @property
    def key_dtype(self) -> torch.dtype | None:
        """That of the keys that come, whatever the layer holds."""
        return None if self._kind is None else self._kind[4]

    @property
    def filled(self) -> int:
        """Tokens in the layer; slots from there on hold nothing of meaning."""
        return self.steps.length

    def reserve(self, key: Tensor, value: Tensor) -> Tensor:
        """Make sure that the rows of key and value fit; the caller writes them, then `advance`s.

        key, value: [batch, new_tokens, num_kv_heads, head_dim]. Memory for others is given up if
        nothing is in it.

        Returns:
            `seq_lens`, the slot of the first new row.

        Raises:
            ValueError: there is no room for them, or others are in the cache.
            TypeError: their dtype cannot be kept. Nothing was written.
        """
        if torch.compiler.is_compiling():  # lengths have no value; the op checks them
            if not self.is_initialized:
                raise ValueError(
                    "StaticKVCache: within torch.compile it wanted memory, got none: call "
                    "early_initialization, or the model once without torch.compile"
                )
            return self.steps.seq_lens
        start = self.steps.length
        self._check_room(start, key.size(1))
        kind = (key.size(0), key.size(2), key.size(3), value.size(3), key.dtype, key.device)
        if kind != self._kind:
            if start > 0:
                raise ValueError(
                    "StaticKVCache: key wanted (batch, num_kv_heads, head_dim, v_head_dim, dtype, "
                    f"device) = {self._kind} like the {start} tokens in the cache, got {kind}; "
                    "reset() makes room for another prompt"
                )
            self._allocate(*kind)
        return self.steps.seq_lens

    def _check_room(self, start: int, new_tokens: int) -> None:
        if start + new_tokens > self.max_seq_len:
            raise ValueError(
                f"StaticKVCache: max_seq_len wanted at least {start + new_tokens} ({start} tokens "
                f"are in the cache, {new_tokens} come), got {self.max_seq_len}; grow(max_seq_len) "
                "makes room for the prompt and all new tokens, with speculative decoding for the "
                "drafts too"
            )

    def advance(self, new_tokens: int) -> None:
        """The rows that were reserved are written."""
        self.steps.advance(self._index, new_tokens)

    def takes(self, batch: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether the buffers are there, for keys and values like these."""
        return self._kind is not None and self._kind[:5] == (
            batch,
            num_kv_heads,
            head_dim,
            head_dim,
            dtype,
        )

    def takes_step(self, window: int, new_tokens: int) -> bool:
        """Whether an op can append so many tokens at once under a window (0: none)."""
        return window == 0

    def _allocate(
        self,
        batch: int,
        num_kv_heads: int,
        k_head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if dtype not in KEY_DTYPES:
            raise TypeError(f"StaticKVCache: key wanted float32, bfloat16 or float16, got {dtype}")
        held = self._wanted_dtype or dtype
        rows = (batch, num_kv_heads, self.slots)
        k_scale = v_scale = None
        # Not inference tensors, so that a cache filled in inference mode can be used outside.
        with torch.inference_mode(False):
            keys = empty_in_huge_pages((*rows, k_head_dim), held, device)
            values = empty_in_huge_pages((*rows, v_head_dim), held, device)
            if held == torch.int8:
                k_scale = torch.empty(rows, dtype=torch.float32, device=device)
                v_scale = torch.empty(rows, dtype=torch.float32, device=device)
        self.keys, self.values = keys, values
        self.k_scale, self.v_scale = k_scale, v_scale
        self.dtype, self.device = held, device
        self._kind = (batch, num_kv_heads, k_head_dim, v_head_dim, dtype, device)
        self.batch_size = self.max_batch_size = batch
        self.steps.move(device)
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
            where that is the cache's. Within a graph, every slot.
        """
        dtype = key_states.dtype
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        seq_lens = self.reserve(key, value)
        slots = self.slots if torch.compiler.is_compiling() else self.filled + key.size(1)
        self._write(key, value, seq_lens)
        self.advance(key.size(1))
        return self._rows(self.keys, self.k_scale, slots, dtype), self._rows(
            self.values, self.v_scale, slots, dtype
        )

    def _write(self, key: Tensor, value: Tensor, seq_lens: Tensor, ring: bool = False) -> None:
        if self.k_scale is None:
            key, value = key.to(self.dtype), value.to(self.dtype)
        ops.kv_cache_update_(
            self.keys,
            self.values,
            key,
            value,
            seq_lens,
            ring=ring,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def _rows(self, buffer: Any, scale: Tensor | None, slots: int, dtype: torch.dtype) -> Tensor:
        rows = buffer[:, :, :slots]
        if scale is not None:
            rows = rows * scale[:, :, :slots, None]
        return rows.to(dtype)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Keys that a mask covers, and the position of the first.

        A model asks before its first layer, so what does not fit is an error before anything else
        has changed, such as the state of a convolution.
        """
        new_tokens = query_length.size(0) if isinstance(query_length, Tensor) else query_length
        if torch.compiler.is_compiling():
            return self.max_seq_len, 0
        filled = self.filled
        self._check_room(filled, new_tokens)
        return filled + new_tokens, 0

    def get_seq_length(self) -> Any:
        """Tokens in the cache: an int; within a graph a tensor."""
        if torch.compiler.is_compiling() and self.is_initialized:
            return self.steps.seq_lens
        return self.filled

    def get_max_length(self) -> int:
        return self.max_seq_len

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.21."""
        return self.max_seq_len

    def reset(self) -> None:
        """Forget all tokens of the cache; the memory stays for the next prompt."""
        self.steps.set(0)

    def crop(self, tokens: int) -> None:
        """Of the whole cache, `StaticKVCache.crop`: its layers have one length."""
        length = cropped(self.filled, tokens)
        self.check_crop(length)
        self.steps.set(length)

    def check_crop(self, length: int) -> None:
        """Raise ValueError if the layer has lost what the first `length` tokens need."""

    @property
    def used(self) -> int:
        """Slots that hold something."""
        return min(self.filled, self.slots)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        if not self.is_initialized:
            return
        if beam_idx.numel() != self.batch_size:
            self.replace_batch(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))
            return
        for buffer in self.buffers():
            rows = buffer[:, :, : self.used]
            rows.copy_(rows.index_select(0, beam_idx.to(buffer.device)))

    def buffers(self) -> list[Tensor]:
        """All that hold a slot a token, [batch, num_kv_heads, slots, ...]."""
        buffers = (self.keys, self.values, self.k_scale, self.v_scale)
        return [buffer for buffer in buffers if buffer is not None]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times, one after the other."""
        self.replace_batch(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` (numbers or a bool mask)."""
        self.replace_batch(lambda rows: rows[indices])

    def replace_batch(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Move the used rows of other sequences into new buffers."""
        if not self.is_initialized:
            return
        used = self.used
        chosen = [choose(buffer[:, :, :used]) for buffer in self.buffers()]
        self._move(chosen, used)

    def grow(self, max_seq_len: int) -> None:
        """Make room for so many tokens."""
        held = [buffer[:, :, : self.used] for buffer in self.buffers()]
        used = self.used
        self.max_seq_len = self.max_cache_len = max_seq_len
        if held:
            self._move(held, used)

    def restore(self, rows: list[Tensor], key_dtype: torch.dtype, length: int) -> None:
        """Hold the rows of another layer of this kind, which has `length` tokens."""
        keys, values = rows[:2]
        batch, num_kv_heads, used = keys.shape[:3]
        self._allocate(batch, num_kv_heads, keys.size(3), values.size(3), key_dtype, keys.device)
        for buffer, held in zip(self.buffers(), rows):
            buffer[:, :, :used].copy_(held)

    def _move(self, rows: list[Tensor], used: int) -> None:
        """New buffers, which begin with these rows of keys, values and their scales."""
        assert self._kind is not None
        self._allocate(rows[0].size(0), *self._kind[1:])
        for buffer, held in zip(self.buffers(), rows):
            buffer[:, :, :used].copy_(held)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.filled} of {self.max_seq_len})"


def cropped(length: int, tokens: int) -> int:
    """What `tokens` leave of `length`: negative removes so many, positive keeps so many."""
    if tokens < 0:
        return max(0, length + tokens)
    return length if tokens == 0 else min(length, tokens)
