"""`fasttps generate`: one prompt, one answer; beside it, if asked, the unpatched model's."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import fasttps
from fasttps.cli.answer import Answer, Drawing, ask, ask_transformers, encode, room_for_answer
from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.load import load, source
from fasttps.cli.patched import check_isa, check_supported, patch_model
from fasttps.cli.progress import Reporter
from fasttps.packed_model.manifest import is_packed_model

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Request:
    """The options of one run, checked.

    `prompt` None reads it from stdin, `seed` None draws one, another None is the model's choice.
    """

    model: Path
    prompt: str | None
    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float | None
    seed: int | None
    dtype: str
    chat: bool
    compare: bool
    patch: bool
    int8_activation: bool


def run(request: Request) -> None:
    """Answer the prompt on standard output.

    Raises:
        CliError: what `ExitCode` lists.
    """
    source(request.model)
    packed = is_packed_model(request.model)
    if packed and (request.compare or not request.patch):
        raise CliError(
            ExitCode.USAGE, f"{request.model} holds packed weights alone, and no unpatched model"
        )
    prompt = read_prompt(request.prompt)
    reporter = Reporter()
    if request.patch:
        check_isa()
        check_supported(request.model)
    loaded = load(
        request.model,
        getattr(torch, request.dtype),
        reporter,
        pack=request.patch,
        int8_activation=request.int8_activation,
    )
    inputs = encode(loaded, prompt, request.chat)
    prompt_tokens = inputs["input_ids"].shape[-1]
    max_new_tokens = room_for_answer(loaded, prompt_tokens, request.max_new_tokens)
    seed = secrets.randbits(32) if request.seed is None else request.seed
    drawing = Drawing(
        request.temperature,
        request.top_k,
        request.top_p,
        request.min_p,
        request.repetition_penalty,
        seed,
    )

    def answer(write: Callable[[str], None]) -> Answer:
        """The answer; when two are compared, both are timed warm."""
        if request.compare:
            ask(loaded, inputs, WARM_UP_TOKENS, drawing)
        return ask(loaded, inputs, max_new_tokens, drawing, write=write)

    def plain_answer() -> Answer:
        """Greedy, it is what transformers says; to draw the same tokens takes the same loop."""
        if request.temperature > 0:
            return answer(lambda text: None)
        penalty = request.repetition_penalty
        ask_transformers(loaded, inputs, WARM_UP_TOKENS, penalty)
        return ask_transformers(loaded, inputs, max_new_tokens, penalty)

    patch = patch_model(loaded, reporter) if request.patch and not packed else None
    ours = answer(write_out)
    write_out("\n")
    name = f"fasttps, {fasttps.isa.active()}" if request.patch else "unpatched"
    reporter.line(figures(name, ours))
    if request.temperature > 0 and request.seed is None:
        reporter.line(f"--seed {seed} draws the same tokens again")
    if patch is not None and request.compare:
        with reporter.step("the unpatched model answers"):
            patch.undo()
            theirs = plain_answer()
        reporter.line(figures("unpatched", theirs))
        reporter.line(agreement(ours, theirs))


def read_prompt(prompt: str | None) -> str:
    """The prompt of the command line, or standard input without its last line break.

    Raises:
        CliError: USAGE: there is none, it is empty, or it is not UTF-8.
    """
    if prompt is None or prompt == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise CliError(ExitCode.USAGE, "no prompt: give it as an argument or on standard input")
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise CliError(ExitCode.USAGE, "the prompt on standard input is not UTF-8") from error
    return checked(prompt)


def checked(prompt: str) -> str:
    """The prompt as text.

    Bytes of an argument that the locale cannot decode reach Python as lone surrogates; in the C
    locale that is all but ASCII. They are decoded once more, as UTF-8.

    Raises:
        CliError: USAGE: it is empty, or held bytes that are not UTF-8.
    """
    if not prompt:
        raise CliError(ExitCode.USAGE, "the prompt is empty")
    try:
        prompt.encode("utf-8")
        return prompt
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(prompt).decode("utf-8")
    except UnicodeError as error:
        raise CliError(ExitCode.USAGE, "the prompt is not UTF-8") from error


def write_out(text: str) -> None:
    """A piece of the answer to standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def figures(name: str, answer: Answer) -> str:
    """One line about how fast an answer came."""
    rate = answer.tokens_per_s
    decode = "" if rate is None else f", then {rate:.1f} tokens/s"
    return (
        f"[{name}] {answer.prompt_tokens} prompt tokens, {len(answer.token_ids)} new: "
        f"first after {answer.prefill_s * 1e3:.0f} ms{decode}"
    )


def agreement(patched: Answer, unpatched: Answer) -> str:
    """One line that says whether two answers are the same tokens, and where they part."""
    if patched.token_ids == unpatched.token_ids:
        same = f"the answers agree: {len(patched.token_ids)} tokens"
        if patched.tokens_per_s and unpatched.tokens_per_s:
            ratio = patched.tokens_per_s / unpatched.tokens_per_s
            same += f"; patched decodes {ratio:.2f} times as fast"
        return same
    pairs = zip(patched.token_ids, unpatched.token_ids)
    shorter = min(len(patched.token_ids), len(unpatched.token_ids))
    first = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
    return f"the answers part at token {first + 1}; unpatched: {unpatched.text}"
