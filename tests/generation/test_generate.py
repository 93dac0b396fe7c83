"""`fasttps.generate` against transformers' own `generate`, on tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fasttps
from tests.support.llama import EOS, VOCAB, tiny_llama

NEW = 12


def prompt(batch: int = 1, tokens: int = 7, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, EOS, (batch, tokens), generator=generator)


def theirs(model: Any, input_ids: torch.Tensor, **options: Any) -> list[list[int]]:
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    options.setdefault("attention_mask", torch.ones_like(input_ids))
    return model.generate(input_ids, **options)[:, input_ids.shape[1] :].tolist()


@pytest.fixture(scope="module", params=["patched", "unpatched"])
def model(request: pytest.FixtureRequest) -> Any:
    made = tiny_llama()
    made.generation_config.eos_token_id = None
    if request.param == "patched":
        fasttps.patch(made)
    return made


def test_greedy_is_that_of_transformers(model: Any) -> None:
    ids = prompt()
    made = fasttps.generate(model, ids, max_new_tokens=NEW)
    assert made.token_ids == theirs(model, ids)
    assert made.finish_reasons == ["length"]
    assert made.prefill_s > 0 < made.decode_s


def test_one_new_token(model: Any) -> None:
    made = fasttps.generate(model, prompt(), max_new_tokens=1)
    assert made.token_ids == theirs(model, prompt(), max_new_tokens=1)
    assert made.decode_s == 0


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_a_left_padded_batch_is_that_of_transformers(model: Any, penalty: float) -> None:
    ids = prompt(batch=3, tokens=9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :8] = 0
    made = fasttps.generate(
        model, ids, max_new_tokens=NEW, attention_mask=mask, repetition_penalty=penalty
    )
    for at, padding in enumerate((4, 0, 8)):  # alone, so that padding counts for nothing
        alone = theirs(model, ids[at : at + 1, padding:], repetition_penalty=penalty)
        assert made.token_ids[at] == alone[0]
    if penalty == 1:
        assert made.token_ids == theirs(model, ids, attention_mask=mask)


def test_penalty_and_suppressed_tokens_come_from_the_generation_config() -> None:
    model = tiny_llama()
    plain = fasttps.generate(model, prompt(), max_new_tokens=NEW, stop_token_ids=()).token_ids
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.suppress_tokens = plain[0][:2]
    ids = prompt()
    made = fasttps.generate(model, ids, max_new_tokens=NEW)
    assert made.token_ids == theirs(model, ids)
    assert made.token_ids[0][0] != plain[0][0]


def test_a_generation_config_that_is_not_obeyed_is_refused() -> None:
    model = tiny_llama()
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="no_repeat_ngram_size = 2"):
        fasttps.generate(model, prompt(), max_new_tokens=2)


def test_stop_tokens_end_each_sequence_by_itself(model: Any) -> None:
    ids = prompt(batch=3)
    free = fasttps.generate(model, ids, max_new_tokens=NEW).token_ids
    stop = free[0][4]
    made = fasttps.generate(model, ids, max_new_tokens=NEW, stop_token_ids=[stop, VOCAB + 5])
    for ours, whole, reason in zip(made.token_ids, free, made.finish_reasons):
        end = whole.index(stop) + 1 if stop in whole else NEW
        assert ours == whole[:end]
        assert reason == ("stop" if stop in whole else "length")


def test_the_end_tokens_of_the_model_stop(model: Any) -> None:
    free = fasttps.generate(model, prompt(), max_new_tokens=NEW).token_ids[0]
    model.generation_config.eos_token_id = [VOCAB + 1, free[3]]
    try:
        made = fasttps.generate(model, prompt(), max_new_tokens=NEW)
        ignored = fasttps.generate(model, prompt(), max_new_tokens=NEW, stop_token_ids=())
    finally:
        model.generation_config.eos_token_id = None
    assert made.token_ids[0] == free[: free.index(free[3]) + 1]
    assert ignored.token_ids[0] == free


def test_every_token_is_handed_on_and_the_callback_can_end_it(model: Any) -> None:
    ids, steps = prompt(batch=2), []
    free = fasttps.generate(model, ids, max_new_tokens=NEW).token_ids

    def three(tokens: list[int | None]) -> bool:
        steps.append(tokens)
        return len(steps) == 3

    made = fasttps.generate(model, ids, max_new_tokens=NEW, on_tokens=three)
    assert made.token_ids == [row[:3] for row in free]
    assert steps == [list(column) for column in zip(*made.token_ids)]
    assert made.finish_reasons == ["callback"] * 2


def test_a_sequence_that_ended_is_handed_on_as_none(model: Any) -> None:
    ids, steps = prompt(batch=2), []
    free = fasttps.generate(model, ids, max_new_tokens=NEW).token_ids
    stop = next(token for token in free[0] if token not in free[1])
    end = free[0].index(stop) + 1
    fasttps.generate(model, ids, max_new_tokens=NEW, stop_token_ids=[stop], on_tokens=steps.append)
    assert [step[0] for step in steps] == free[0][:end] + [None] * (NEW - end)


def test_a_seed_draws_the_same_tokens(model: Any) -> None:
    options = {"max_new_tokens": NEW, "temperature": 2.0, "top_p": 0.95}
    first, again, other = (
        fasttps.generate(model, prompt(), seed=seed, **options).token_ids for seed in (3, 3, 4)
    )
    assert first == again != other
    generator = torch.Generator().manual_seed(3)
    made = fasttps.generate(model, prompt(), generator=generator, **options)
    assert made.token_ids == first


def test_a_cache_that_holds_the_conversation_goes_on(model: Any) -> None:
    ids = prompt()
    cache = fasttps.StaticKVCache(model.config, 40)
    first = fasttps.generate(model, ids, max_new_tokens=5, cache=cache)
    whole = torch.cat((ids, torch.tensor(first.token_ids), prompt(seed=1)), dim=1)
    second = fasttps.generate(model, whole, max_new_tokens=5, cache=cache)
    assert second.token_ids == theirs(model, whole, max_new_tokens=5)
    with pytest.raises(ValueError, match="cache wanted fewer"):
        fasttps.generate(model, ids, max_new_tokens=5, cache=cache)


def test_a_cache_of_transformers_serves(model: Any) -> None:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    made = fasttps.generate(model, prompt(), max_new_tokens=NEW, cache=cache)
    assert made.token_ids == theirs(model, prompt())


WRONG = {
    "input_ids wanted an int64": ({"input_ids": [[1]]}, TypeError),
    "input_ids wanted .batch, tokens.": ({"input_ids": torch.empty(1, 0).long()}, ValueError),
    "max_new_tokens wanted at least 1": ({"max_new_tokens": 0}, ValueError),
    "max_new_tokens wanted an int": ({"max_new_tokens": 1.0}, TypeError),
    "attention_mask wanted .1, 7.": ({"attention_mask": torch.ones(1, 3)}, ValueError),
    "padding at the left": (
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])},
        ValueError,
    ),
    "above 0": ({"top_p": 0.5}, ValueError),
    "exclude each other": ({"seed": 1, "generator": torch.Generator()}, ValueError),
    "want a tokenizer": ({"stop_strings": ["x"]}, ValueError),
    "tokenizer wanted a tokenizer, got int": ({"stop_strings": ["x"], "tokenizer": 3}, TypeError),
    "cache wanted a cache of transformers' kind, got str": ({"cache": "static"}, TypeError),
    "not empty": ({"stop_strings": [""]}, ValueError),
    "wanted strings": ({"stop_strings": "x"}, ValueError),
    "wanted a list of strings, got int": ({"stop_strings": 5}, TypeError),
    "model wanted a model, got NoneType": ({"model": None}, TypeError),
    "attention_mask wanted a tensor, got list": ({"attention_mask": [[1]]}, TypeError),
    "temperature wanted a number, got str": ({"temperature": "1"}, TypeError),
    "top_k wanted an int, got float": ({"temperature": 1.0, "top_k": 2.5}, TypeError),
    "min_p wanted a number, got NoneType": ({"temperature": 1.0, "min_p": None}, TypeError),
    "repetition_penalty wanted a number, got str": ({"repetition_penalty": "a"}, TypeError),
    "seed wanted an int, got float": ({"temperature": 1.0, "seed": 1.5}, TypeError),
    "generator wanted a torch.Generator, got int": ({"generator": 3}, TypeError),
    "on_tokens wanted a callable, got int": ({"on_tokens": 3}, TypeError),
    "stop_token_ids wanted ints, got .'a', 'b'.": ({"stop_token_ids": "ab"}, TypeError),
    "stop_token_ids wanted ints, got .1.5.": ({"stop_token_ids": [1.5]}, TypeError),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named(message: str) -> None:
    arguments, error = WRONG[message]
    arguments = {"input_ids": prompt(), "max_new_tokens": 3, "temperature": 0.0, **arguments}
    with pytest.raises(error, match=message):
        fasttps.generate(**{"model": tiny_llama(), **arguments})
