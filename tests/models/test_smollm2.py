"""SmolLM2-135M-Instruct, a real model: patched, it says what it said.

In float32 the greedy tokens are the same. In bfloat16 both models round, each in its own places,
so they are judged by their distance from the float32 model: the patched one is no farther away.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import fasttps

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import LlamaForCausalLM

from tests.support.smollm2 import (
    CONTINUATIONS,
    QUESTIONS,
    greedy_along,
    mean_kl,
    smollm2,
    smollm2_prompts,
    smollm2_tokenizer,
)

# The argument's name changed in transformers 5.24.
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
NEW_TOKENS = 64
DECODED_TOKENS = 64  # of the text that is teacher-forced
MAX_KL_RATIO = 1.1
TEXT = Path(__file__).resolve().parents[1] / "support" / "teacher_text.txt"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return smollm2_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[torch.Tensor]:
    return smollm2_prompts(tokenizer)


@pytest.fixture(scope="module")
def model() -> Any:
    """The float32 model as transformers has it."""
    return smollm2(torch.float32)


@pytest.fixture(scope="module")
def patched() -> Any:
    """The float32 model, patched."""
    other = smollm2(torch.float32)
    fasttps.patch(other)
    return other


def generate(model: Any, prompt: torch.Tensor, **options: Any) -> list[list[int]]:
    """The new tokens of every sequence, greedy, always as many: the end token is not taken."""
    count = options.setdefault("max_new_tokens", NEW_TOKENS)
    options.setdefault("attention_mask", torch.ones_like(prompt))
    output = model.generate(prompt, do_sample=False, min_new_tokens=count, **options)
    return output[:, prompt.shape[1] :].tolist()


def test_greedy_along_an_answer_is_what_the_unpatched_model_generates(
    model: Any, prompts: list[torch.Tensor]
) -> None:
    (answer,) = generate(model, prompts[0], max_new_tokens=16)
    assert greedy_along(model, prompts[0], answer) == answer
    other = [*answer[:8], answer[8] + 1, *answer[9:]]
    assert greedy_along(model, prompts[0], other)[:9] == answer[:9]


@pytest.mark.parametrize("at", range(len(QUESTIONS) + len(CONTINUATIONS)))
def test_the_same_64_greedy_tokens(
    model: Any, patched: Any, prompts: list[torch.Tensor], at: int
) -> None:
    cache = fasttps.StaticKVCache(patched.config, prompts[at].shape[1] + NEW_TOKENS)
    (ours,) = generate(patched, prompts[at], **{CACHE: cache})
    assert len(ours) == NEW_TOKENS
    assert ours == greedy_along(model, prompts[at], ours)


@pytest.mark.parametrize("at", [0, len(QUESTIONS) + len(CONTINUATIONS) - 1])
def test_the_same_64_greedy_tokens_with_the_cache_of_transformers(
    model: Any, patched: Any, prompts: list[torch.Tensor], at: int
) -> None:
    (ours,) = generate(patched, prompts[at])
    assert ours == greedy_along(model, prompts[at], ours)


def test_the_answer_is_right(patched: Any, tokenizer: Any, prompts: list[torch.Tensor]) -> None:
    output = patched.generate(prompts[0], do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(output[0, prompts[0].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_the_same_beams(model: Any, patched: Any, prompts: list[torch.Tensor]) -> None:
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 16}
    cache = fasttps.StaticKVCache(patched.config, prompts[1].shape[1] + 16)
    ours = generate(patched, prompts[1], **{CACHE: cache}, **options)
    assert ours == generate(model, prompts[1], **options)


def test_the_same_left_padded_batch(model: Any, patched: Any, tokenizer: Any) -> None:
    tokenizer.padding_side = "left"
    texts = [CONTINUATIONS[3], CONTINUATIONS[0], CONTINUATIONS[2]]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    padded, mask = batch["input_ids"], batch["attention_mask"]
    assert (mask == 0).any()
    cache = fasttps.StaticKVCache(patched.config, padded.shape[1] + 24)
    options = {"attention_mask": mask, "max_new_tokens": 24}
    ours = generate(patched, padded, **{CACHE: cache}, **options)
    assert ours == generate(model, padded, **options)
    assert ours == generate(patched, padded, **options)


@torch.inference_mode()
def teacher_forced(
    model: Any, token_ids: torch.Tensor, cache: Any, decoded: int = DECODED_TOKENS
) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of a text: a prompt, its end token by token."""
    at = token_ids.shape[1] - decoded
    pieces = [token_ids[:, :at], *token_ids[:, at:].split(1, dim=1)] if decoded else [token_ids]
    logits = []
    for piece in pieces:
        out = model(piece, **{CACHE: cache}, use_cache=True)
        logits.append(out.logits[0].float())
    return torch.cat(logits).log_softmax(dim=-1)


def test_bfloat16_is_no_farther_from_float32_than_unpatched(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import DynamicCache

    token_ids = tokenizer(TEXT.read_text(), return_tensors="pt")["input_ids"]
    tokens = token_ids.shape[1]
    assert tokens > 300
    rounded = smollm2(torch.bfloat16)
    exact = teacher_forced(model, token_ids, DynamicCache(config=model.config), decoded=0)
    theirs = teacher_forced(rounded, token_ids, DynamicCache(config=rounded.config))
    with fasttps.patch(rounded):
        ours = teacher_forced(rounded, token_ids, fasttps.StaticKVCache(rounded.config, tokens))
    unpatched_kl, patched_kl = mean_kl(exact, theirs), mean_kl(exact, ours)
    with capsys.disabled():
        print(
            f"\nSmolLM2-135M, {tokens} tokens teacher-forced, mean KL from float32 in nats: "
            f"bfloat16 unpatched {unpatched_kl:.3e}, patched {patched_kl:.3e}, "
            f"ratio {patched_kl / unpatched_kl:.3f}"
        )
    assert 0 < unpatched_kl < 0.1, "the measure itself"
    assert patched_kl <= MAX_KL_RATIO * unpatched_kl
