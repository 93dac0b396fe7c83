"""Damaged files of a saved model: an error on one line that is ours, no crash, no memory for it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import fasttps
from fasttps.packed_model import MANIFEST, BrokenModel
from fasttps.packed_model.tensor_file import BrokenTensorFile, TensorFile
from tests.support.llama import tiny_llama
from tests.support.mutations import damaged, survives

TENSORS = "fasttps-00001-of-00001.safetensors"
FILES = (TENSORS, MANIFEST, "config.json")
HEADERS, LOADS = 1000, 40
LONG = 20


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fasttps.save(fasttps.patch(tiny_llama(tie_word_embeddings=True), "int4"), tmp_path / "saved")
    return tmp_path / "saved"


def run(folder: Path, begin: int, headers: int, loads: int) -> None:
    whole = {name: (folder / name).read_bytes() for name in FILES}
    focus = int.from_bytes(whole[TENSORS][:8], "little") + 8
    fasttps.load(folder)  # what is imported and made once
    for seed in range(begin, begin + headers):
        (folder / TENSORS).write_bytes(damaged(whole[TENSORS], seed, focus))
        survives(lambda: TensorFile(folder / TENSORS), seed, BrokenTensorFile)
    (folder / TENSORS).write_bytes(whole[TENSORS])
    refused = 0
    for name in FILES:
        for seed in range(begin, begin + loads):
            (folder / name).write_bytes(damaged(whole[name], seed, min(focus, len(whole[name]))))
            refused += not survives(lambda: fasttps.load(folder), seed, BrokenModel)
        (folder / name).write_bytes(whole[name])
    assert refused > loads


def test_a_damaged_folder_is_an_error_or_another_model(saved: Path) -> None:
    run(saved, 0, HEADERS, LOADS)


@pytest.mark.slow
def test_many_damaged_folders(saved: Path) -> None:
    run(saved, 10**6, HEADERS * LONG, LOADS * LONG)
