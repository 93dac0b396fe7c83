"""Models and ways to run the command, for the tests of the command."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fasttps.cli import main
from tests.support import tiny_folder
from tests.support.command import Ran


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_folder.save_llama(folder)
    return folder


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ran]]:
    """Run the command in this process: the cases that need no process of their own."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TQDM_DISABLE"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # main sets them: put them back after

    def call(*arguments: object) -> Ran:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capfd.readouterr())

    yield call
    logging.set_verbosity(verbosity)
