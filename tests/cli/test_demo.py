"""`fasttps demo`: the real model, unpatched and patched, the same greedy answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fasttps.cli.errors import ExitCode
from tests.support.command import Ran
from tests.support.smollm2 import smollm2_folder

Run = Callable[..., Ran]


@pytest.fixture(autouse=True)
def converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's model from the folder it was converted to: a second instead of twenty."""
    folder = smollm2_folder()
    monkeypatch.setattr("fasttps.cli.demo.smollm2_path", lambda: folder)


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


def test_greedy_answers_are_those_of_transformers(run: Run) -> None:
    ran = run(
        "generate", "--model", smollm2_folder(), "--dtype", "float32", "--compare",
        "--max-new-tokens", "48", "Write a short poem about a lighthouse in winter.",
    )  # fmt: skip
    assert ran.code == ExitCode.OK, ran.err
    assert "the answers agree" in ran.err
