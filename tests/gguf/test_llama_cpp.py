"""Files made by llama.cpp's converter and quantizer (fixtures/make.py), and what llama.cpp says.

Its logits after a prompt prove the order of RoPE's rows, the norms' offset, scales and windows: a
wrong one of these changes them by about their own size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import gguf

import fasttps
from fasttps import ops
from fasttps.gguf.header import read_header
from fasttps.gguf.pack import FORMATS
from fasttps.gguf.tensors import dequantize, read_bytes
from tests.support import gguf_writer
from tests.support.gguf_families import FAMILIES, greedy
from tests.support.gguf_writer import Kind

FIXTURES = Path(__file__).parent / "fixtures"
ANSWERS = json.loads((FIXTURES / "answers.json").read_text())
CONVERTED = [name for name in ANSWERS if name in FAMILIES]
# llama.cpp rounds activations to float16 before every product with a float16 matrix: relative
# errors of 2^-11, some forty of them one after another, in logits of size 1 to 2.
CLOSE = 0.02
BLOCKS = read_header(FIXTURES / "blocks.gguf").tensors
TYPES = sorted({name.split(".")[0] for name in BLOCKS})


def load(name: str, **options: Any) -> Any:
    model = fasttps.load_gguf(FIXTURES / f"{name}.gguf", dtype=torch.float32, **options).model
    model.config._attn_implementation = "eager"
    return model


@torch.inference_mode()
def along(model: Any, answer: dict[str, Any]) -> torch.Tensor:
    """The logits after the prompt and after each token of an answer but the last."""
    ids = torch.tensor([answer["prompt"] + answer["tokens"][:-1]])
    return model(ids, use_cache=False).logits[0, len(answer["prompt"]) - 1 :]


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_model_says_what_llama_cpp_says(name: str) -> None:
    answer = ANSWERS[name]
    logits = along(load(name, pack=False), answer)
    exact = torch.tensor(answer["logits"])
    torch.testing.assert_close(logits[0], exact, rtol=0, atol=CLOSE)
    taken = logits.gather(1, torch.tensor(answer["tokens"])[:, None])[:, 0]
    assert (taken >= logits.max(-1).values - CLOSE).all()


@pytest.mark.parametrize("name", CONVERTED)
def test_the_writer_of_these_tests_writes_what_the_converter_writes(
    name: str, tmp_path: Path
) -> None:
    model = load(name, pack=False)
    gguf_writer.write(tmp_path / "m.gguf", model, name, lambda name: Kind.F16)
    ours, theirs = (
        gguf.GGUFReader(path) for path in (tmp_path / "m.gguf", FIXTURES / f"{name}.gguf")
    )
    stored = [{t.name: (t.tensor_type, t.data) for t in read.tensors} for read in (ours, theirs)]
    assert stored[0].keys() == stored[1].keys()
    for tensor, (kind, data) in stored[1].items():
        assert stored[0][tensor][0] == kind
        if kind == Kind.F32:  # a norm has been shifted and back
            assert abs(stored[0][tensor][1] - data).max() < 1e-6, tensor
        else:
            assert (stored[0][tensor][1] == data).all(), tensor
    prefix = FAMILIES[name][0]
    for key, field in ours.fields.items():
        if key.startswith(f"{prefix}.") and "context_length" not in key:
            if key.endswith(("key_length", "value_length")) and key not in theirs.fields:
                continue  # stated by ours where the class has a head_dim that the folder has not
            assert field.contents() == pytest.approx(theirs.fields[key].contents()), key


def test_a_quantised_model_keeps_its_bits() -> None:
    """Q4_K_M by llama.cpp: Q4_K and Q6_K in the file, and what it takes for widths of its own."""
    packed, plain = load("q4_k_m", int8_activation=False), load("q4_k_m", pack=False)
    types = {info.type_name for info in read_header(FIXTURES / "q4_k_m.gguf").tensors.values()}
    assert {"Q4_K", "Q6_K"} <= types
    layer = packed.model.layers[0]
    assert layer.self_attn.q_proj.packed_weight.format == ops.PackedFormat.Q4_K
    assert layer.self_attn.v_proj.packed_weight.format == ops.PackedFormat.Q6_K
    assert packed.lm_head.packed_weight.format == ops.PackedFormat.Q6_K
    state = packed.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    stored = {t.name: t for t in gguf.GGUFReader(FIXTURES / "q4_k_m.gguf").tensors}
    for name in ("ffn_gate", "ffn_up", "ffn_down", "attn_v"):
        tensor = stored[f"blk.0.{name}.weight"]
        exact = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        part = {"attn_v": "self_attn.v_proj"}.get(name, f"mlp.{name[4:]}_proj")
        assert torch.equal(state[f"model.layers.0.{part}.weight"], exact), name


def test_a_quantised_model_says_what_llama_cpp_says() -> None:
    """llama.cpp rounds activations to int8, in larger groups than ours: both are near exact."""
    answer = ANSWERS["q4_k_m"]
    exact = along(load("q4_k_m", pack=False), answer)
    theirs = torch.tensor(answer["logits"])
    limit = 0.15 * exact[0].norm()
    assert (theirs - exact[0]).norm() < limit
    ours = along(load("q4_k_m", int8_activation=True), answer)
    assert (ours[0] - exact[0]).norm() < limit
    floats = along(load("q4_k_m", int8_activation=False), answer)
    torch.testing.assert_close(floats, exact, rtol=0, atol=1e-3)
    model = load("q4_k_m", int8_activation=False)
    ids = torch.tensor([answer["prompt"]])
    assert greedy(model, ids, 12) == greedy(load("q4_k_m", pack=False), ids, 12)


@pytest.mark.parametrize("name", TYPES)
def test_the_values_of_blocks_are_those_of_ggml(name: str) -> None:
    """Of every type, by ggml, by the gguf package, and by the loader: the same bits."""
    path, info = FIXTURES / "blocks.gguf", BLOCKS[f"{name}.blocks"]
    values = BLOCKS[f"{name}.values"]
    exact = read_bytes(path, values).view(torch.float32)
    rows, cols = info.shape
    blocks = read_bytes(path, info).view(rows, -1)
    theirs = gguf.quants.dequantize(blocks.numpy(), Kind[name])
    assert torch.equal(torch.from_numpy(theirs).flatten(), exact)
    assert torch.equal(dequantize(blocks, info, info.shape).flatten(), exact)
    if name in FORMATS:
        kind, group_size = FORMATS[name]
        packed = ops.pack_gguf(blocks, format=kind, rows=rows, cols=cols)
        unpacked = ops.unpack_weight(
            packed, format=kind, rows=rows, cols=cols, group_size=group_size
        )
        assert torch.equal(unpacked.flatten(), exact)
