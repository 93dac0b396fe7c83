"""The stepper of a patched model: a token is one op, and Python about it as little as can be."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fasttps.generation.stepper import ModelStepper
from fasttps.models.obstacles import runs_more


class DecodeStepper(ModelStepper):
    """As ModelStepper, with steps through `FusedCausalLM.decode` wherever it takes them."""

    def __init__(self, model: Any, cache: Any, max_seq_len: int) -> None:
        super().__init__(model, cache, max_seq_len)
        self._kv_start: Tensor | None = None

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is not None:
            self._kv_start = input_ids.size(1) - attention_mask.sum(-1)
        return super().prefill(input_ids, attention_mask)

    def step(self, token_ids: Tensor) -> Tensor:
        logits = self._decode(token_ids, argmax=False)
        return super().step(token_ids) if logits is None else logits

    def greedy_step(self, token_ids: Tensor) -> Tensor:
        tokens = self._decode(token_ids, argmax=True)
        return super().greedy_step(token_ids) if tokens is None else tokens

    def _decode(self, token_ids: Tensor, argmax: bool) -> Tensor | None:
        decode = getattr(self._model, "decode", None)
        if self._length == self._limit:  # all keys are made anew
            return None
        if decode is None or runs_more(self._model):  # undone meanwhile, or hooks that must fire
            return None
        at = self._length
        out = decode(
            token_ids[:, None],
            self._cache,
            position_ids=None if self._mask is None else self._positions[:, at : at + 1],
            kv_start=self._kv_start,
            argmax=argmax,
        )
        if isinstance(out, str):
            return None
        if self._limit is not None:
            self._tokens.append(token_ids[:, None])
        self._length += 1
        return out[:, -1]
