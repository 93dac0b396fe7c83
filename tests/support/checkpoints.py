"""Tiny checkpoints that other packages have quantised (tests/checkpoint/fixtures/make.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttps.packed_model.tensor_file import TensorFile, write_tensors

FOLDER = Path(__file__).resolve().parents[1] / "checkpoint" / "fixtures"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
FILE = "model.safetensors"


def fixture(name: str) -> Path:
    return FOLDER / name


def copy_of(name: str, folder: Path) -> Path:
    """A copy of a fixture, to be changed."""
    return shutil.copytree(fixture(name), folder / name)


def expected(name: str) -> dict[str, dict[str, str]]:
    """Of every quantised weight what its package says it is."""
    return json.loads((fixture(name) / "expected.json").read_text())["weights"]


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """The folder, its config passed through `edit`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    return folder


def edit_scheme(folder: Path, **changes: Any) -> Path:
    """The folder, its quantization_config changed."""
    return edit_config(folder, lambda config: config["quantization_config"].update(changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """The folder, its tensors passed through `edit`."""
    file = TensorFile(folder / FILE)
    tensors = {name: file.tensor(name).clone() for name in sorted(file.names)}
    edit(tensors)
    write_tensors(folder / FILE, tensors)
    return folder


def least_lead(model: torch.nn.Module, ids: Tensor, prompt: int) -> float:
    """Of the likeliest token over the next, where `ids` [1, tokens] were chosen greedily."""
    with torch.inference_mode():
        logits = model(ids).logits[:, prompt - 1 : -1].float()
    first, second = logits.topk(2, -1).values.unbind(-1)
    return float((first - second).min())
