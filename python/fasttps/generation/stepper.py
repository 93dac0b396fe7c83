"""What the loop asks of a model: a prompt or one token a sequence in, logits out."""

from __future__ import annotations

import inspect
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fasttps.models.transformers_adapter import CACHE_NAMES


@runtime_checkable
class Stepper(Protocol):
    """A model and its cache, for one batch of sequences."""

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Logits [batch, vocabulary] after the prompts [batch, tokens].

        attention_mask: 0 where a prompt is padded, at its left; None: nowhere.
        """
        ...

    def step(self, token_ids: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after one more token [batch] of each sequence."""
        ...

    def greedy_step(self, token_ids: Tensor) -> Tensor:
        """The likeliest token [batch] after one more: the argmax of `step`."""
        ...


class ModelStepper:
    """A causal language model of transformers, patched or not, through its forward.

    Everything that a step needs is made before the first one: a step takes views.
    """

    def __init__(self, model: Any, cache: Any, max_seq_len: int) -> None:
        """
        Args:
            cache: of transformers' kind. It may hold the first tokens of the prompt already.
            max_seq_len: the most tokens that a sequence will have, the prompt included.
        """
        accepted = inspect.signature(model.forward).parameters
        self._model = model
        self._cache = cache
        self._max_seq_len = max_seq_len
        self._takes_positions = "position_ids" in accepted
        self._always = {
            # Of a forward that takes any names, the one that all releases take.
            next((name for name in CACHE_NAMES if name in accepted), CACHE_NAMES[-1]): cache,
            "use_cache": True,
        }
        if "logits_to_keep" in accepted:
            self._always["logits_to_keep"] = 1
        self._length = 0
        # longrope turns by other angles past a length: all keys are made anew for the token there.
        self._limit = _longrope_limit(model.config)
        self._tokens: list[Tensor] = []  # [batch, tokens] so far, where there is such a length
        self._mask: Tensor | None = None
        self._positions = torch.empty(0)

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        batch, tokens = input_ids.shape
        cached = int(self._cache.get_seq_length())
        if cached >= tokens:
            raise ValueError(
                f"generate: cache wanted fewer than the prompt's {tokens} tokens, got {cached}"
            )
        positions = torch.arange(self._max_seq_len, device=input_ids.device)
        self._positions = positions[None]
        if attention_mask is not None:
            if not self._takes_positions:
                raise ValueError(
                    f"generate: attention_mask wanted no padding, as {type(self._model).__name__} "
                    "takes no position_ids"
                )
            padding = tokens - attention_mask.sum(-1, keepdim=True)
            self._positions = (positions[None] - padding).clamp(min=0)
            self._mask = attention_mask.new_ones(batch, self._max_seq_len)
            self._mask[:, :tokens] = attention_mask
        if self._limit is not None:
            self._tokens = [input_ids]
            if 0 < cached <= self._limit < tokens:
                self._cache.reset()
                cached = 0
        self._length = cached
        return self._forward(input_ids[:, cached:])

    def step(self, token_ids: Tensor) -> Tensor:
        if self._limit is not None:
            self._tokens.append(token_ids[:, None])
            if self._length == self._limit:
                self._cache.reset()
                self._length = 0
                return self._forward(torch.cat(self._tokens, dim=1))
        return self._forward(token_ids[:, None])

    def greedy_step(self, token_ids: Tensor) -> Tensor:
        return self.step(token_ids).argmax(-1)

    def _forward(self, input_ids: Tensor) -> Tensor:
        begin, end = self._length, self._length + input_ids.size(1)
        moving: dict[str, Tensor] = {}
        if self._takes_positions:
            moving["position_ids"] = self._positions[:, begin:end]
        if self._mask is not None:
            moving["attention_mask"] = self._mask[:, :end]
        logits = self._model(input_ids=input_ids, **moving, **self._always).logits[:, -1]
        self._length = end
        return logits


def _longrope_limit(config: Any) -> int | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return None
    return getattr(config, "original_max_position_embeddings", None)
