"""`fasttps generate` on tiny random models: what a person sees on both streams."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fasttps.cli.app import MAX_TEMPERATURE, MIN_TEMPERATURE
from fasttps.cli.errors import ExitCode
from tests.support import tiny_folder
from tests.support.command import Ran, process_environment, run_process

Run = Callable[..., Ran]
EXACT = ("--dtype", "float32", "--max-new-tokens", "24")


def expected(folder: Path, prompt: str, new_tokens: int = 24) -> str:
    """What the unpatched model says, asked without the command."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True) + "\n"


def test_a_process_answers_on_standard_output_alone(llama_folder: Path) -> None:
    ran = run_process("generate", "--model", llama_folder, *EXACT, "--no-chat", "hello")
    assert ran.code == ExitCode.OK, ran.err
    assert ran.out == expected(llama_folder, "hello")
    for words in (
        "reading the tokenizer",
        "reading the weights",
        "packing the weights",
        "tokens/s",
    ):
        assert words in ran.err
    assert "\x1b" not in ran.err, "plain text where there is no terminal"
    assert "\r" not in ran.err


def test_a_process_reads_standard_input_and_compares(llama_folder: Path) -> None:
    asked = ("generate", "--model", llama_folder, *EXACT, "--compare")
    ran = run_process(*asked, stdin=b"hello\n")
    assert ran.code == ExitCode.OK, ran.err
    assert ran.out == expected(llama_folder, "<user>hello<answer>")
    assert "the answers agree: 24 tokens" in ran.err
    assert "[unpatched]" in ran.err
    assert "[fasttps, " in ran.err


def test_a_terminal_gets_a_bar(llama_folder: Path) -> None:
    try:
        ours, theirs = pty.openpty()
    except OSError as error:
        pytest.skip(f"this machine gives no pseudo-terminal: {error}")
    process = subprocess.Popen(
        [sys.executable, "-m", "fasttps", "generate", "--model", llama_folder, *EXACT, "hello"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**process_environment(), "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # Linux: the other side of the terminal is closed
        pass
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == ExitCode.OK, shown
    assert b"\x1b[" in shown
    assert b"packing the weights" in shown
    assert b"\x1b" not in out


def test_the_answer_streams(run: Run, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = []
    monkeypatch.setattr("fasttps.cli.generate.write_out", pieces.append)
    assert run("generate", "--model", llama_folder, *EXACT, "--no-chat", "hello").code == 0
    assert "".join(pieces) == expected(llama_folder, "hello")
    assert len(pieces) > 2


def test_a_dash_reads_standard_input(
    run: Run, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    ran = run("generate", "--model", llama_folder, *EXACT, "--no-chat", "-")
    assert ran.out == expected(llama_folder, "two\nlines")


def test_a_utf8_argument_is_understood_in_the_c_locale(llama_folder: Path) -> None:
    asked = ("generate", "--model", llama_folder, *EXACT, "--no-chat", "héllo")
    ran = run_process(*asked, PYTHONUTF8="0", LC_ALL="C")
    assert ran.code == ExitCode.OK, ran.err
    assert ran.out == expected(llama_folder, "héllo").encode("ascii", "replace").decode()


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
def test_the_outermost_temperatures_draw_where_a_token_is_suppressed(
    run: Run, llama_folder: Path, tmp_path: Path, temperature: float
) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "copy")
    defaults = json.loads((folder / "generation_config.json").read_text())
    defaults["suppress_tokens"] = [5]
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    ran = run("generate", "--model", folder, *EXACT, "hello", "--temperature", temperature)
    assert ran.code == ExitCode.OK, ran.err


def test_the_chat_template_is_used_unless_told_otherwise(run: Run, llama_folder: Path) -> None:
    asked = ("generate", "--model", llama_folder, *EXACT, "hello")
    assert run(*asked).out == expected(llama_folder, "<user>hello<answer>")
    assert run(*asked, "--no-chat").out == expected(llama_folder, "hello")


def test_a_tokenizer_without_a_template_takes_the_bare_prompt(run: Run, tmp_path: Path) -> None:
    tiny_folder.save_llama(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    ran = run("generate", "--model", tmp_path, *EXACT, "hello")
    assert ran.out == expected(tmp_path, "hello")


def test_no_patch_says_the_same_and_packs_nothing(run: Run, llama_folder: Path) -> None:
    ran = run("generate", "--model", llama_folder, *EXACT, "--no-chat", "--no-patch", "hello")
    assert ran.out == expected(llama_folder, "hello")
    assert "packing" not in ran.err


def test_a_seed_draws_the_same_tokens(run: Run, llama_folder: Path) -> None:
    asked = ("generate", "--model", llama_folder, *EXACT, "hello", "--temperature", "5")
    first, again = run(*asked, "--seed", "7"), run(*asked, "--seed", "7")
    assert first.code == ExitCode.OK
    assert first.out == again.out
    assert first.out != run(*asked, "--seed", "8").out


def test_a_drawn_seed_is_told_and_draws_the_same_again(run: Run, llama_folder: Path) -> None:
    asked = ("generate", "--model", llama_folder, *EXACT, "hello", "--temperature", "5")
    first = run(*asked)
    seed = first.err.split("--seed ")[1].split()[0]
    assert run(*asked, "--seed", seed).out == first.out
    assert run(*asked).out != first.out


def test_a_small_top_p_is_greedy(run: Run, llama_folder: Path) -> None:
    asked = ("generate", "--model", llama_folder, *EXACT, "hello")
    drawn = run(*asked, "--temperature", "1", "--top-p", "1e-6")
    assert drawn.out == run(*asked).out


@pytest.mark.parametrize("filters", [("--top-k", "1"), ("--min-p", "1")], ids=" ".join)
def test_a_filter_that_leaves_one_token_is_greedy(
    run: Run, llama_folder: Path, filters: tuple[str, str]
) -> None:
    asked = ("generate", "--model", llama_folder, *EXACT, "hello")
    assert run(*asked, "--temperature", "3", *filters).out == run(*asked).out


def test_a_repetition_penalty_is_that_of_transformers(run: Run, llama_folder: Path) -> None:
    asked = ("generate", "--model", llama_folder, *EXACT, "hello")
    ran = run(*asked, "--repetition-penalty", "3", "--compare")
    assert ran.code == ExitCode.OK, ran.err
    assert "the answers agree" in ran.err
    assert ran.out != run(*asked).out


def test_drawn_answers_are_compared_too(run: Run, llama_folder: Path) -> None:
    asked = ("generate", "--model", llama_folder, *EXACT, "hello", "--temperature", "2")
    ran = run(*asked, "--top-p", "0.9", "--compare")
    assert ran.code == ExitCode.OK, ran.err
    assert "the answers agree" in ran.err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_answer(run: Run, llama_folder: Path, dtype: str) -> None:
    asked = ("generate", "--model", llama_folder, "--max-new-tokens", "4", "hello")
    ran = run(*asked, "--dtype", dtype, "--compare")
    assert ran.code == ExitCode.OK
    assert "the answers" in ran.err


def test_the_answer_stops_where_the_positions_end(run: Run, llama_folder: Path) -> None:
    ran = run("generate", "--model", llama_folder, "--dtype", "float32", "hello", "--compare")
    assert ran.code == ExitCode.OK
    assert "the answers agree" in ran.err


def test_a_gguf_file_answers_as_its_folder(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    """Query and key rows lie interleaved in GGUF: the key rows must be undone by the KV heads."""
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    path = tmp_path / "tiny.gguf"
    tiny_folder.save_gguf(path, tiny_folder.save_llama(tmp_path / "llama"))
    asked = (*EXACT, "hello hello", "--compare")
    from_gguf = run("generate", "--model", path, *asked)
    assert from_gguf.code == ExitCode.OK, from_gguf.err
    assert from_gguf.out == run("generate", "--model", llama_folder, *asked).out
    assert "the answers agree" in from_gguf.err


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3", "glm4", "lfm2"])
def test_a_gguf_file_of_another_family_answers(run: Run, family: str) -> None:
    """A file of llama.cpp's converter; undone, its weights are read from it once more."""
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    path = Path(__file__).parents[1] / "gguf" / "fixtures" / f"{family}.gguf"
    ran = run("generate", "--model", path, *EXACT, "HELLO", "--compare")
    assert ran.code == ExitCode.OK, ran.err
    assert "the answers agree: " in ran.err


def test_markup_and_control_text_reach_the_terminal_as_they_are(
    run: Run, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fasttps.cli.generate.agreement", lambda *_: "[bold]x[/bold] [/] \\[")
    ran = run("generate", "--model", llama_folder, *EXACT, "hello", "--compare")
    assert "[bold]x[/bold] [/] \\[" in ran.err


def test_a_closed_pipe_ends_it_quietly(llama_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fasttps",
        "generate",
        "--model",
        llama_folder,
        *EXACT,
        "hello",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
        env=process_environment(),
    )
    os.close(writer)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGPIPE, err
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
