"""Ask a loaded model: the prompt's tokens, the loop, the answer streamed and timed.

The loop is `model.generate` of transformers, whether the model is patched or not.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TextStreamer

from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.load import Loaded

DEFAULT_MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedily at temperature 0, else drawn with `seed`."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate`; top_p is the only filter, whatever the model's defaults."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0,
        }


@dataclass(frozen=True)
class Answer:
    """What a model said, and how fast.

    Attributes:
        token_ids: the new tokens, the end token included where the model gave one.
        text: their text without special tokens.
        prompt_tokens: length of the prompt.
        prefill_s: seconds from the call to the first new token.
        decode_s: seconds from the first new token to the last.
    """

    token_ids: list[int]
    text: str
    prompt_tokens: int
    prefill_s: float
    decode_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Decoded tokens a second, the first not counted; None where there is no second token."""
        if len(self.token_ids) < 2 or self.decode_s <= 0:
            return None
        return (len(self.token_ids) - 1) / self.decode_s


def encode(loaded: Loaded, prompt: str, chat: bool) -> dict[str, torch.Tensor]:
    """The prompt as `generate` takes it, within the chat template where `chat` and there is one.

    Raises:
        CliError: USAGE: the prompt has no tokens.
    """
    tokenizer = loaded.tokenizer
    if chat and getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    if encoded["input_ids"].shape[-1] == 0:
        raise CliError(ExitCode.USAGE, "the prompt has no tokens")
    return {
        "input_ids": encoded["input_ids"].long(),
        "attention_mask": torch.ones_like(encoded["input_ids"]),
    }


def room_for_answer(loaded: Loaded, prompt_tokens: int, max_new_tokens: int | None) -> int:
    """How many tokens to generate at most: as asked, or the default cut to the model's positions.

    Raises:
        CliError: USAGE: the prompt and what was asked for do not fit in the model's positions.
    """
    positions = getattr(loaded.model.config, "max_position_embeddings", None)
    if positions is None:
        return max_new_tokens or DEFAULT_MAX_NEW_TOKENS
    room = positions - prompt_tokens
    if room < (max_new_tokens or 1):
        raise CliError(
            ExitCode.USAGE,
            f"a prompt of {prompt_tokens} tokens and {max_new_tokens or 1} new ones exceed "
            f"the model's {positions} positions",
        )
    return max_new_tokens or min(DEFAULT_MAX_NEW_TOKENS, room)


def ask(
    loaded: Loaded,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    cache: Any = None,
    write: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Generate an answer, `write` each piece of its text as it comes, and time it.

    `cache`: an empty cache to generate into; by default the one that transformers makes.
    """
    model, prompt_tokens = loaded.model, inputs["input_ids"].shape[-1]
    arguments: dict[str, Any] = {**inputs, **sampling.arguments(), "max_new_tokens": max_new_tokens}
    if model.generation_config.pad_token_id is None:
        arguments["pad_token_id"] = 0  # one sequence is never padded; silences a warning
    if cache is not None:
        accepted = inspect.signature(model.forward).parameters
        arguments["cache" if "cache" in accepted else "past_key_values"] = cache
    stream = _Stream(loaded.tokenizer, write)
    torch.manual_seed(sampling.seed)
    begin = time.perf_counter()
    output = model.generate(**arguments, streamer=stream)
    token_ids = output[0, prompt_tokens:].tolist()
    times = stream.token_times
    return Answer(
        token_ids,
        loaded.tokenizer.decode(token_ids, skip_special_tokens=True),
        prompt_tokens,
        times[0] - begin,
        times[-1] - times[0],
    )


class _Stream(TextStreamer):
    """Hands on the text and notes when each token came."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.token_times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not (self.skip_prompt and self.next_tokens_are_prompt):
            self.token_times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)
