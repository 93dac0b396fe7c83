"""`fasttps quantize`, and `generate` on what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fasttps
from fasttps.cli.demo import smollm2_path
from fasttps.cli.errors import ExitCode
from tests.support import tiny_folder
from tests.support.command import Ran, run_process
from tests.support.smollm2 import smollm2_folder

Run = Callable[..., Ran]
ASK = ("--max-new-tokens", "24", "--no-chat", "hello")


def answer(run: Run, model: Path, *options: str) -> str:
    ran = run("generate", "--model", model, *options, *ASK)
    assert ran.code == ExitCode.OK, ran.err
    return ran.out


def test_a_process_packs_a_folder_and_answers_from_it(
    run: Run, llama_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ran = run_process("quantize", llama_folder, out, "--dtype", "float32")
    assert ran.code == ExitCode.OK, ran.err
    assert ran.out == ""
    for words in ("packing the weights", "writing", f"{out}: 0.00 GB in"):
        assert words in ran.err
    ours = run("generate", "--model", out, "--dtype", "float32", *ASK)
    theirs = run("generate", "--model", llama_folder, "--dtype", "float32", *ASK)
    assert ours.code == ExitCode.OK, ours.err
    assert ours.out == theirs.out
    assert "mapping the weights" in ours.err and "reading the weights" not in ours.err


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_rounded_to_bf16(run: Run, llama_folder: Path, tmp_path: Path, kind: str) -> None:
    """From float32 files, without a whole model in another dtype in between."""
    model = llama_folder
    if kind == "gguf":
        from transformers import AutoModelForCausalLM

        model = tmp_path / "model.gguf"
        tiny_folder.save_gguf(model, AutoModelForCausalLM.from_pretrained(llama_folder))
    out = tmp_path / "out"
    ran = run("quantize", model, out, "--weights", "bf16", "--kv", "int8")
    assert ran.code == ExitCode.OK, ran.err
    loaded = fasttps.load(out)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.packed_weight.format == fasttps.ops.PackedFormat.BF16
    assert json.loads((out / "fasttps.json").read_text())["kv"] == "int8"
    frequencies = loaded.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    plain = run("generate", "--model", model, *ASK)
    ours = run("generate", "--model", out, *ASK)
    assert ours.code == plain.code == ExitCode.OK, ours.err
    assert ours.out.split()[:1] == plain.out.split()[:1]  # int8 caches may part ways later


def test_the_options_of_rounding(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--weights", "int4", "--group-size", "64", "--lm-head", "int8")
    ran = run("quantize", llama_folder, out, *options, "--float-activation")
    assert ran.code == ExitCode.OK, ran.err
    loaded = fasttps.load(out)
    down, head = loaded.model.layers[0].mlp.packed_down, loaded.lm_head.packed_weight
    assert (down.format.name, down.group_size, down.int8_activation) == ("INT4", 64, False)
    assert (head.format.name, head.group_size) == ("INT8_GROUP", 32)
    assert run("generate", "--model", out, *ASK).code == ExitCode.OK


def test_the_bits_of_a_gguf_file_stay(run: Run, tmp_path: Path) -> None:
    smollm2_folder()  # skips where the package is not installed; it cannot be imported by itself
    out = tmp_path / "out"
    ran = run("quantize", smollm2_path(), out, "--kv", "int8")
    assert ran.code == ExitCode.OK, ran.err
    loaded = fasttps.load(out)
    down, head = loaded.model.layers[0].mlp.packed_down, loaded.lm_head.packed_weight
    assert (down.format.name, head.format.name) == ("INT4_MIN", "INT8_GROUP")
    assert json.loads((out / "fasttps.json").read_text())["kv"] == "int8"
    assert run("generate", "--model", out, *ASK).code == ExitCode.OK
    ran = run("quantize", smollm2_path(), tmp_path / "other", "--group-size", "32")
    assert ran.code == ExitCode.USAGE and "--group-size" in ran.error_line


def test_what_cannot_be_done_with_packed_weights(
    run: Run, llama_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run("quantize", llama_folder, out).code == ExitCode.OK
    for option in ("--compare", "--no-patch"):
        ran = run("generate", "--model", out, option, *ASK)
        assert ran.code == ExitCode.USAGE and "holds packed weights alone" in ran.error_line
    ran = run("quantize", out, tmp_path / "again")
    assert ran.code == ExitCode.USAGE and "is packed already" in ran.error_line


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--weights", "int3"], ExitCode.USAGE, "int3"),
        (["--group-size", "32"], ExitCode.USAGE, "group_size wanted None"),
        (["--int8-activation"], ExitCode.USAGE, "int8_activation wanted None"),
    ],
    ids=str,
)
def test_options_that_are_wrong(
    run: Run,
    llama_folder: Path,
    tmp_path: Path,
    options: list[str],
    code: ExitCode,
    words: str,
) -> None:
    ran = run("quantize", llama_folder, tmp_path / "out", *options)
    assert ran.code == code and words in ran.error_line
    assert not (tmp_path / "out").exists()


def test_folders_that_are_wrong(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    ran = run("quantize", llama_folder, llama_folder)
    assert ran.code == ExitCode.USAGE and "wanted one without a model" in ran.error_line
    ran = run("quantize", tmp_path / "none", tmp_path / "out")
    assert ran.code == ExitCode.BROKEN_MODEL and "no file or folder" in ran.error_line
    tiny_folder.save_gpt2(tmp_path / "gpt2")
    ran = run("quantize", tmp_path / "gpt2", tmp_path / "out")
    assert ran.code == ExitCode.UNSUPPORTED_MODEL
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text((llama_folder / "config.json").read_text())
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\xff" * 16)
    ran = run("quantize", tmp_path / "broken", tmp_path / "out")
    assert ran.code == ExitCode.BROKEN_MODEL and "model.safetensors" in ran.error_line


def test_a_saved_folder_that_is_broken(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("quantize", llama_folder, out).code == ExitCode.OK
    (out / "fasttps.json").write_text("{}")
    ran = run("generate", "--model", out, *ASK)
    assert ran.code == ExitCode.BROKEN_MODEL and "fasttps.json" in ran.error_line
