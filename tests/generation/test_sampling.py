"""The distribution of the next token: that of transformers' processors, in their order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from fasttps.generation import Sampler, Sampling
from tests.support.llama import tiny_llama

SETTINGS = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(3.0, top_k=1),
    Sampling(1.0, top_k=40),
    Sampling(1.3, top_k=5000),
    Sampling(1.0, top_p=0.9),
    Sampling(4.0, top_p=0.999),  # a nucleus of thousands
    Sampling(0.5, top_p=1e-6),
    Sampling(1.0, min_p=0.05),
    Sampling(1.0, min_p=1.0),
    Sampling(0.8, top_k=50, top_p=0.95),
    Sampling(1.5, top_k=200, top_p=0.8, min_p=0.02),
    Sampling(1.2, top_p=0.97, min_p=0.1),
    Sampling(0.9, repetition_penalty=1.3),
    Sampling(1.0, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=0.8),
    Sampling(1.1, top_p=0.7, suppress_tokens=(0, 3, 8)),
    Sampling(0.0, repetition_penalty=2.0, suppress_tokens=(1,)),
]


def theirs(sampling: Sampling, logits: Tensor, seen: Tensor) -> Tensor:
    """Probabilities by the processors that `generate` of transformers makes of the settings."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=sampling.temperature > 0,
        temperature=sampling.temperature or 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        repetition_penalty=float(sampling.repetition_penalty),
        suppress_tokens=list(sampling.suppress_tokens) or None,
    )
    processors = tiny_llama()._get_logits_processor(
        config, input_ids_seq_length=seen.shape[1], device="cpu", model_kwargs={}
    )
    scores = processors(seen, logits.clone())
    if sampling.temperature == 0:
        return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1)
    return scores.softmax(-1)


@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 20011])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_distribution_is_that_of_transformers(sampling: Sampling, vocabulary: int) -> None:
    if any(token >= vocabulary - 1 for token in sampling.suppress_tokens):
        pytest.skip("the vocabulary lacks a suppressed token")
    generator = torch.Generator().manual_seed(vocabulary)
    for spread in (0.5, 3.0, 20.0):
        logits = spread * torch.randn(3, vocabulary, generator=generator)
        seen = torch.randint(vocabulary, (3, 9), generator=generator)
        ours = Sampler(sampling).probabilities(logits, seen)
        expected = theirs(sampling, logits, seen)
        # The same tokens, but for one a row whose cumulative probability lies on top_p up to
        # float32 rounding, where the sum of transformers may fall to the other side.
        differ = (ours > 0) != (expected > 0)
        assert differ.sum(-1).max() <= (1 if sampling.top_p < 1 else 0)
        edge = torch.where(differ, torch.maximum(ours, expected), 0).sum(-1, keepdim=True)
        assert edge.max() <= 1e-5
        tolerance = 1e-5 * expected + 2 * edge + 1e-12
        assert ((ours - expected).abs() <= tolerance)[~differ].all()
        torch.testing.assert_close(ours.sum(-1), torch.ones(3))


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=5), Sampling(1.0, top_k=5, top_p=0.9)])
def test_ties_with_the_last_of_top_k_stay(sampling: Sampling) -> None:
    logits = torch.zeros(2, 50)
    logits[0, 10:14] = 4
    logits[0, 20:30] = 3
    logits[1, :6] = 1
    ours = Sampler(sampling).probabilities(logits)
    expected = theirs(sampling, logits, logits.long())
    assert torch.equal((ours > 0).sum(-1), (expected > 0).sum(-1))
    torch.testing.assert_close(ours.sort(-1).values, expected.sort(-1).values)


def test_bfloat16_logits_are_judged_in_float32() -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    sampling = Sampling(0.3, min_p=0.01)
    ours = Sampler(sampling).probabilities(logits)
    torch.testing.assert_close(ours, theirs(sampling, logits.float(), logits.long()))


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(1.0, top_k=6), Sampling(1.0, top_p=0.8)], ids=str
)
def test_what_is_drawn_has_the_distribution(sampling: Sampling) -> None:
    """Pearson's chi-square of 40,000 draws against the probabilities, at 5 standard deviations."""
    draws = 40_000
    logits = torch.tensor([[0.0, 1.0, -2.0, 0.5, 2.0, -1.0, 1.5, -math.inf, 0.0]])
    sampler = Sampler(sampling, torch.Generator().manual_seed(5))
    drawn = sampler(logits.expand(draws, -1))
    counts = torch.bincount(drawn, minlength=logits.shape[1]).double()
    expected = draws * sampler.probabilities(logits)[0].double()
    assert torch.equal(counts > 0, expected > 0)
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_a_token_without_probability_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at either end of the random numbers, where rounding could reach past the last."""
    logits = torch.full((1, 6), -math.inf)
    logits[0, 1:4] = torch.tensor([0.1, 0.7, 0.3])
    for uniform, token in ((0.0, 1), (1 - 2**-53, 3)):
        monkeypatch.setattr(
            torch, "rand", lambda shape, uniform=uniform, **_: torch.full(shape, uniform).double()
        )
        assert Sampler(Sampling(1.0))(logits).tolist() == [token]


def test_a_seed_draws_the_same() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))

    def draws(seed: int) -> list[Any]:
        sampler = Sampler(Sampling(2.0), torch.Generator().manual_seed(seed))
        return [sampler(logits).tolist() for _ in range(8)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 1e-320])
@pytest.mark.parametrize("more", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_temperature_whose_quotients_are_infinite_is_the_argmax(
    temperature: float, more: dict[str, Any]
) -> None:
    logits = torch.tensor([[-300.0, 200.0, 299.5, 300.0], [-5.0, -8.0, -7.0, -math.inf]])
    probabilities = Sampler(Sampling(temperature, **more)).probabilities(logits)
    assert probabilities.tolist() == [[0, 0, 0, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize("logits", [[math.nan, 0.0], [-math.inf, -math.inf]])
def test_logits_that_nothing_can_be_drawn_from_raise(logits: list[float]) -> None:
    with pytest.raises(RuntimeError, match="NaN"):
        Sampler(Sampling(1.0))(torch.tensor([logits]))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"suppress_tokens": (-1,)},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        Sampling(**settings)
