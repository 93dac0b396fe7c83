"""What the README says is so: its code runs, its table and its names are those of the project."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fasttps import ops
from tests.support import tiny_folder
from tests.support.decoder import Decoder
from tests.test_rooms import OPS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DTYPES = ["float32", "bfloat16", "float16", "int8 cache", "uint8"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def table() -> dict[str, list[str]]:
    """op: the cells of its row, from the second on."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", README, re.MULTILINE)
    return {op: cells.split(" | ") for op, cells in rows}


def test_table_has_a_row_for_each_op():
    assert {op.rstrip("_") for op in table()} == set(OPS)


def rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """New rows, a cache for them, and the scales of an int8 one."""
    if dtype != torch.int8:
        return torch.ones(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 1, 4, 16, dtype=dtype), {}
    scales = {name: torch.zeros(1, 1, 4) for name in ("k_scale", "v_scale")}
    return torch.ones(1, 1, 1, 16), torch.zeros(1, 1, 4, 16, dtype=dtype), scales


def call_update(dtype: torch.dtype) -> None:
    new, cache, scales = rows(dtype)
    ops.kv_cache_update_(cache, cache.clone(), new, new, torch.tensor(0), **scales)


def attention(op: Callable) -> Callable[[torch.dtype], None]:
    def call(dtype: torch.dtype) -> None:
        new, cache, scales = rows(dtype)
        op(new, new, new, cache, cache.clone(), torch.tensor(0), **scales)

    return call


def call_merge(dtype: torch.dtype) -> None:
    ops.merge_attention([torch.ones(1, 1, 1, 16, dtype=dtype)], [torch.ones(1, 1, 1)])


def call_mlp(dtype: torch.dtype) -> None:
    format = ops.PackedFormat.of(dtype if dtype.is_floating_point else torch.float32)
    weight = torch.ones(16, 16, dtype=format.dtype)
    gate_up = ops.pack_gate_up(weight, weight, format=format)
    down = ops.pack_weight(weight, format=format)
    x = torch.ones(1, 16, dtype=dtype)
    ops.gate_up_silu_mlp(
        x, gate_up, down, gate_up_format=format, down_format=format, intermediate_size=16
    )


def call_pack(dtype: torch.dtype) -> None:
    format = ops.PackedFormat.of(dtype if dtype.is_floating_point else torch.float32)
    ops.pack_weight(torch.ones(16, 16, dtype=dtype), format=format)


def call_linear(dtype: torch.dtype) -> None:
    format = ops.PackedFormat.of(dtype if dtype.is_floating_point else torch.float32)
    packed = ops.pack_weight(torch.ones(16, 16, dtype=format.dtype), format=format)
    ops.packed_linear(torch.ones(1, 16, dtype=dtype), packed, format=format, rows=16)


def call_gguf(dtype: torch.dtype) -> None:
    ops.pack_gguf(torch.ones(16, 18, dtype=dtype), format=4, rows=16, cols=32)


def call_quants(dtype: torch.dtype) -> None:
    quants = torch.ones(16, 32, dtype=dtype)
    ops.pack_quants(quants, torch.ones(16, 1).half(), format=4, group_size=32)


def call_embedding(dtype: torch.dtype) -> None:
    packed = ops.pack_weight(torch.ones(16, 16), format=0)
    ids = torch.zeros(1, dtype=torch.int64)
    ops.packed_embedding(ids, packed, format=0, rows=16, cols=16, dtype=dtype)


def call_step(dtype: torch.dtype) -> None:
    made = Decoder(layers=1, int8_cache=dtype == torch.int8)
    arguments = made.arguments(torch.ones(1, 1, made.hidden_size), 0)
    if dtype != torch.int8:
        arguments["input"] = arguments["input"].to(dtype)
        for name in ("k_caches", "v_caches"):
            arguments[name] = [cache.to(dtype) for cache in arguments[name]]
    ops.decode_step(**arguments)


CALLS = {
    "kv_cache_update_": call_update,
    "rope_attention_decode": attention(ops.rope_attention_decode),
    "causal_prefill": attention(ops.causal_prefill),
    "merge_attention": call_merge,
    "gate_up_silu_mlp": call_mlp,
    "packed_linear": call_linear,
    "packed_embedding": call_embedding,
    "decode_step": call_step,
    "pack_gguf": call_gguf,
    "pack_quants": call_quants,
    "pack_weight": call_pack,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", CALLS)
def test_table_says_which_dtypes_an_op_takes(op, dtype):
    said = re.split("[,;] ", table()[op][1])
    assert set(said) <= set(DTYPES)
    torch_dtype = getattr(torch, dtype.split()[0])
    if dtype in said:
        CALLS[op](torch_dtype)
    else:
        with pytest.raises((TypeError, ValueError), match=op):
            CALLS[op](torch_dtype)


def test_table_claims_no_device_that_has_no_op():
    for op, cells in table().items():
        word = op.removesuffix("_")
        places = (f"csrc/hip/{word}.hip", f"csrc/npu/ops/{word}.cpp")
        for place, cell in zip(places, cells[2:], strict=True):
            assert (cell == "-") == (not (ROOT / place).exists()), op


@pytest.mark.parametrize("block", range(len(blocks("python"))))
def test_python_blocks_run(block, tmp_path):
    code = blocks("python")[block]
    names = {}
    if "folder" in code:
        tiny_folder.save_llama(tmp_path)
        names["folder"] = tmp_path
    if "load_gguf(file)" in code:
        names["file"] = tmp_path / "tiny.gguf"
        tiny_folder.save_gguf(names["file"], tiny_folder.save_llama(tmp_path / "saved"))
    with torch.no_grad():
        exec(code, names)
    if "out" in names:
        # The window holds all that a block of five tokens and one more leaves to see.
        assert names["out"].shape == (1, 1, 8, 64)
        assert names["seq_lens"] == 5
    if "answer" in names:
        assert names["answer"].shape[1] > names["inputs"]["input_ids"].shape[1]


def test_cpp_block_is_taken_from_the_example():
    example = (ROOT / "csrc/examples/decode_step/main.cpp").read_text()
    (code,) = blocks("cpp")
    for piece in code.split("\n\n"):
        assert " ".join(piece.split()) in " ".join(example.split())


def test_commands_and_options_exist():
    makefile = (ROOT / "Makefile").read_text()
    commands = " ".join(blocks("sh"))
    for target in re.findall(r"^make ([\w-]+)", commands, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    typer_testing = pytest.importorskip("typer.testing")
    from fasttps.cli.app import app

    for command, line in re.findall(r"^fasttps (\w+)(.*)$", commands, re.MULTILINE):
        help_text = typer_testing.CliRunner().invoke(app, [command, "--help"], color=False).output
        for option in re.findall(r"--[\w-]+", line):
            assert option in help_text, (command, option)


def test_versions_are_those_that_are_installed_for_the_tests():
    pins = "\n".join(f.read_text() for f in (ROOT / "requirements").glob("*.txt"))
    torch_version = re.search(r"^torch==(\S+)$", pins, re.MULTILINE)[1]
    assert f"pip install torch=={torch_version} " in README
    assert f"tested on Linux with torch {torch_version}:" in README
    for version in re.findall(r"^transformers==(\d+\.\d+)", pins, re.MULTILINE):
        assert re.search(rf"transformers [^\n]*\b{re.escape(version)}\b", README), version


def test_build_requirements_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {re.split("[<>=]", name)[0] for name in project["build-system"]["requires"]}
    (line,) = re.findall(r"^pip install (setuptools .*)$", README, re.MULTILINE)
    assert set(line.split()) == wanted
    assert "torch" not in wanted, "torch must come first, and pinned"


def test_links_lead_somewhere():
    for document in ("README.md", "CONTRIBUTING.md", "csrc/ops/README.md", "csrc/cpu/README.md"):
        file = ROOT / document
        for target in re.findall(r"\]\(([^)#:]+)\)", file.read_text()):
            assert (file.parent / target).exists(), (document, target)
