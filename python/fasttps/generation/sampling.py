"""How the next token is chosen from logits.

The distribution is that of transformers' processors in the order in which its `generate` runs
them: repetition penalty, suppressed tokens, temperature, top-k, top-p, min-p. What differs is the
work: no sort of the vocabulary, and one random number a sequence instead of one a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor
from torch.nn.functional import threshold

_NUCLEUS_GUESS = 128  # candidates looked at first for top-p; 32 times as many if they do not do
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the defaults change nothing.

    Attributes:
        temperature: logits are divided by it; 0: the likeliest token, and no filter.
        top_k: keep so many of the likeliest tokens, and ties with the last; 0: all.
        top_p: keep the likeliest tokens until they have this probability together.
        min_p: keep tokens that have this share of the likeliest one's probability.
        repetition_penalty: of tokens in the prompt or the answer, positive logits are divided
            by it and negative ones multiplied; padding does not count.
        suppress_tokens: ids that are never chosen.

    Raises:
        ValueError: a value outside its range.
        TypeError: a value that is no number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (
            ("temperature", Real),
            ("top_k", Integral),
            ("top_p", Real),
            ("min_p", Real),
            ("repetition_penalty", Real),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                wanted = "an int" if kind is Integral else "a number"
                raise TypeError(f"generate: {name} wanted {wanted}, got {type(value).__name__}")

        def check(name: str, valid: bool, wanted: str) -> None:
            if not valid:
                raise ValueError(f"generate: {name} wanted {wanted}, got {getattr(self, name)!r}")

        check("temperature", 0 <= self.temperature < math.inf, "a finite number, at least 0")
        check("top_k", self.top_k >= 0, "an int, at least 0")
        check("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1")
        check("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1")
        check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number above 0")
        check("suppress_tokens", all(token >= 0 for token in self.suppress_tokens), "ids")

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the likeliest one by the logits as they are."""
        return self.temperature == 0 and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether something comes before the temperature."""
        return self.repetition_penalty != 1 or bool(self.suppress_tokens)


class Sampler:
    """Draws tokens as a `Sampling` says, with a generator of its own or torch's."""

    def __init__(self, sampling: Sampling, generator: torch.Generator | None = None) -> None:
        self.sampling = sampling
        self.generator = generator
        self._suppressed = torch.tensor(sampling.suppress_tokens, dtype=torch.int64)

    def __call__(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Token ids [batch] for logits [batch, vocabulary].

        seen: ids [batch, any] that the repetition penalty counts.

        Raises:
            RuntimeError: a row has NaN, or no token that can be drawn.
        """
        scores = self._processed(logits, seen)
        if self.sampling.temperature == 0:
            return scores.argmax(-1)
        weights, ids = self._candidates(scores)
        drawn = self._draw(weights)
        return (drawn if ids is None else ids.gather(1, drawn)).squeeze(1)

    def probabilities(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """The distribution [batch, vocabulary] that tokens are drawn from, in float32."""
        scores = self._processed(logits, seen)
        if self.sampling.temperature == 0:
            return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1)
        weights, ids = self._candidates(scores)
        probabilities = weights / weights.sum(-1, keepdim=True)
        if ids is None:
            return probabilities
        return torch.zeros_like(scores).scatter_(1, ids, probabilities)

    def _processed(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Scores in float32, in memory of their own if they differ from the logits."""
        scores, penalty = logits.float(), self.sampling.repetition_penalty
        if penalty != 1 and seen is not None:
            of_seen = scores.gather(1, seen)
            of_seen = torch.where(of_seen < 0, of_seen * penalty, of_seen / penalty)
            scores = scores.scatter(1, seen, of_seen)
        if self.sampling.suppress_tokens:
            scores = scores.index_fill(1, self._suppressed.to(scores.device), -math.inf)
        return scores

    def _candidates(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights [batch, some] by which to draw, 0 where a filter says no, and their ids.

        The likeliest weighs 1. Ids are None where the candidates are the vocabulary in its order.
        """
        top_k, top_p, min_p = self.sampling.top_k, self.sampling.top_p, self.sampling.min_p
        # The difference to the likeliest, 0 for itself, so that no quotient is NaN.
        scores = (scores - scores.amax(-1, keepdim=True)) / max(self.sampling.temperature, _TINY)
        ids: Tensor | None = None
        total: Tensor | None = None
        if 0 < top_k < scores.size(1):
            scores, ids = _top_k(scores, top_k)
        elif top_p < 1:
            total = scores.logsumexp(-1, keepdim=True)
            scores, ids = _likeliest(scores, total, top_p)
        weights = scores.exp()
        if top_p < 1:
            if total is None:
                total = scores.logsumexp(-1, keepdim=True)
            mass = (scores - total).double().exp()
            before = mass.cumsum(-1) - mass  # the mass of all likelier ones
            before[:, 0] = 0  # the likeliest stays, be it rounded as it may
            weights = weights * (before < top_p)
        if min_p > 0:
            below = torch.nextafter(torch.tensor(min_p), torch.tensor(0.0)).item()
            weights = threshold(weights, below, 0)  # ten times as fast as a mask
        return weights, ids

    def _draw(self, weights: Tensor) -> Tensor:
        """Columns [batch, 1], by the inverse of the cumulative distribution in float64."""
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        if not bool(((total > 0) & torch.isfinite(total)).all()):
            raise RuntimeError("generate: the logits of a sequence hold NaN, or only -inf")
        uniform = torch.rand(
            total.shape, dtype=torch.float64, device=total.device, generator=self.generator
        )
        # Below the total, also after rounding: a column is taken only where the sum grows.
        target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulative, target, right=True)


def _top_k(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The top_k greatest scores, falling, and those equal to the least of them; and their ids."""
    kept, ids = scores.topk(top_k)
    least = kept[:, -1:]
    with_ties = int((scores >= least).sum(-1).max())
    if with_ties > top_k:
        kept, ids = scores.topk(with_ties)
        kept = kept.masked_fill(kept < least, -math.inf)
    return kept, ids


def _likeliest(scores: Tensor, total: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """So many of the greatest scores, falling, that each row has `mass`; and their ids."""
    vocabulary = scores.size(1)
    count = min(_NUCLEUS_GUESS, vocabulary)
    while True:
        kept, ids = scores.topk(count)
        covered = (kept - total).double().exp().sum(-1)
        if count == vocabulary or bool((covered >= mass).all()):
            return kept, ids
        count = min(32 * count, vocabulary)
