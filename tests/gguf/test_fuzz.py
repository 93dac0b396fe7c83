"""Damaged GGUF files: an error on one line that is ours, no crash, and no memory for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import fasttps
from fasttps.gguf import BrokenGguf, UnsupportedGguf
from fasttps.gguf.header import read_header
from tests.support.gguf_families import tiny
from tests.support.gguf_writer import Kind, write
from tests.support.mutations import damaged, survives

FAMILIES = ("llama", "phi3", "gemma3", "glm", "lfm2", "ministral3")
HEADERS, LOADS = 1500, 60  # of each family
LONG = 20


@pytest.fixture(params=FAMILIES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    write(path, tiny(request.param), request.param, lambda name: Kind.Q8_0)
    return path


def header_bytes(path: Path) -> int:
    return min(info.begin for info in read_header(path).tensors.values())


def load(path: Path, pack: bool) -> Any:
    return fasttps.load_gguf(path, dtype=torch.float32, pack=pack)


def run(file: Path, begin: int, headers: int, loads: int) -> None:
    data, focus = file.read_bytes(), header_bytes(file)
    load(file, True)  # what is imported and made once
    load(file, False)
    kept = 0
    for seed in range(begin, begin + headers):
        file.write_bytes(damaged(data, seed, focus))
        kept += survives(lambda: read_header(file), seed, BrokenGguf)
    assert kept < headers
    refused = 0
    for seed in range(begin, begin + loads):
        file.write_bytes(damaged(data, seed, focus))
        read = partial(load, file, pack=bool(seed % 2))
        refused += not survives(read, seed, BrokenGguf, UnsupportedGguf)
    assert refused > loads // 4


def test_a_damaged_file_is_an_error_or_another_file(file: Path) -> None:
    run(file, 0, HEADERS, LOADS)


@pytest.mark.slow
def test_many_damaged_files(file: Path) -> None:
    run(file, 10**6, HEADERS * LONG, LOADS * LONG)
