"""`fasttps demo`: the real model, unpatched and patched, the same greedy answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fasttps.cli.demo import smollm2_path
from fasttps.cli.errors import ExitCode
from tests.support.command import Ran
from tests.support.smollm2 import smollm2_folder

Run = Callable[..., Ran]


@pytest.fixture(autouse=True, scope="module")
def file() -> Path:
    smollm2_folder()  # skips where the package is not installed
    return smollm2_path()


def test_the_demo_answers_and_agrees(run: Run) -> None:
    ran = run("demo")
    assert ran.code == ExitCode.OK, ran.err
    assert ran.out.count("The capital of France is Paris.") == 2
    assert "the answers agree" in ran.out
    assert "tokens/s" in ran.out


def test_a_disagreement_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import fasttps.cli.demo as demo

    ask = demo.ask

    def wrong(*arguments: object) -> object:
        answer = ask(*arguments)
        answer.token_ids[-1] += 1
        return answer

    monkeypatch.setattr(demo, "ask", wrong)
    ran = run("demo", "--max-new-tokens", "3")
    assert ran.code == ExitCode.DISAGREEMENT
    assert "part at token 3" in ran.error_line


def test_a_real_file_answers_packed_as_transformers_does_dequantised(run: Run, file: Path) -> None:
    ran = run(
        "generate", "--model", file, "--dtype", "float32", "--float-activation", "--compare",
        "--max-new-tokens", "32", "Write a short poem about a lighthouse in winter.",
    )  # fmt: skip
    assert ran.code == ExitCode.OK, ran.err
    assert "the answers agree" in ran.err


def test_a_real_file_answers_with_int8_activations(run: Run, file: Path) -> None:
    ran = run("generate", "--model", file, "What is the capital of France?")
    assert ran.code == ExitCode.OK, ran.err
    assert "Paris" in ran.out
    assert "packing" not in ran.err
