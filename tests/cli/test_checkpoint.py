"""The command on folders that are quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import fasttps
from fasttps.cli.errors import ExitCode
from tests.support.checkpoints import copy_of, edit_scheme, fixture
from tests.support.command import Ran

Run = Callable[..., Ran]
ASK = ("--max-new-tokens", "8", "--dtype", "float32", "--float-activation", "hello")


def test_generates_as_the_dequantised_model(run: Run) -> None:
    for name in ("awq", "gptq-act-order"):
        ran = run("generate", "--model", fixture(name), "--compare", *ASK)
        assert ran.code == 0, ran
        assert "the answers agree" in ran.err
        assert run("generate", "--model", fixture(name), "--no-patch", *ASK).out == ran.out


def test_quantize_keeps_the_quants(run: Run, tmp_path: Path) -> None:
    ran = run("quantize", fixture("ct-int4-zero"), tmp_path / "out", "--dtype", "float32")
    assert ran.code == 0, ran
    model = fasttps.load(tmp_path / "out")
    plain = fasttps.load_checkpoint(fixture("ct-int4-zero"), dtype=torch.float32, pack=False).model
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    options = ("--weights", "int8", "--dtype", "float32")
    ran = run("quantize", fixture("awq"), tmp_path / "int8", *options)
    assert ran.code == 0, ran


def test_says_which_scheme_is_not_read(run: Run, tmp_path: Path) -> None:
    folder = edit_scheme(copy_of("awq", tmp_path), quant_method="hqq")
    for command in (("generate", "--model", folder, "hello"), ("quantize", folder, tmp_path / "o")):
        ran = run(*command)
        assert ran.code == ExitCode.UNSUPPORTED_MODEL, ran
        assert "hqq" in ran.error_line and ran.out == ""


def test_says_what_is_broken(run: Run, tmp_path: Path) -> None:
    folder = copy_of("awq", tmp_path)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    ran = run("generate", "--model", folder, "hello")
    assert ran.code == ExitCode.BROKEN_MODEL, ran
    assert "model.safetensors" in ran.error_line
