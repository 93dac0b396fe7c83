"""Ask a loaded model: the prompt's tokens, the loop, the answer streamed and timed.

The loop is `fasttps.generate`, or for comparison `model.generate` of transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

import fasttps
from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.load import Loaded
from fasttps.generation import TextStream

DEFAULT_MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Drawing:
    """How the next token is chosen: greedily at temperature 0, else drawn with `seed`.

    The filters are these, whatever the model's defaults; `repetition_penalty` None: the model's.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """The arguments of `fasttps.generate`."""
        return dict(vars(self))


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
    drawing: Drawing,
    *,
    write: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Generate an answer, `write` each piece of its text as it comes, and time it.

    Raises:
        CliError: UNSUPPORTED_MODEL: its generation_config asks for what is not done.
    """
    stream = TextStream(loaded.tokenizer)

    def show(tokens: list[int | None]) -> None:
        for token in tokens:
            if token is not None and (piece := stream.push(token)):
                write(piece)

    try:
        made = fasttps.generate(
            loaded.model,
            inputs["input_ids"],
            max_new_tokens=max_new_tokens,
            on_tokens=show,
            **drawing.arguments(),
        )
    except ValueError as error:
        raise CliError(ExitCode.UNSUPPORTED_MODEL, str(error)) from error
    write(stream.finish())
    return _answer(loaded, inputs, made.token_ids[0], made.prefill_s, made.decode_s)


def ask_transformers(
    loaded: Loaded,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    repetition_penalty: float | None,
) -> Answer:
    """The greedy answer by transformers' own `generate` and cache, timed likewise."""
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
    if repetition_penalty is not None:
        arguments["repetition_penalty"] = repetition_penalty
    if loaded.model.generation_config.pad_token_id is None:
        arguments["pad_token_id"] = 0  # one sequence is never padded; silences a warning
    clock = _Clock()
    begin = time.perf_counter()
    output = loaded.model.generate(**inputs, **arguments, streamer=clock)
    token_ids = output[0, inputs["input_ids"].shape[-1] :].tolist()
    first, last = clock.times[1], clock.times[-1]  # the prompt is the first to be put
    return _answer(loaded, inputs, token_ids, first - begin, last - first)


class _Clock(BaseStreamer):
    """Notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _answer(
    loaded: Loaded,
    inputs: dict[str, torch.Tensor],
    token_ids: list[int],
    prefill_s: float,
    decode_s: float,
) -> Answer:
    text = loaded.tokenizer.decode(token_ids, skip_special_tokens=True)
    return Answer(token_ids, text, inputs["input_ids"].shape[-1], prefill_s, decode_s)
