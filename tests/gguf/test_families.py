"""Every architecture: a tiny model of transformers, written as llama.cpp would, says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import gguf

import fasttps
from fasttps.gguf import BrokenGguf, UnsupportedGguf
from fasttps.gguf.pack import FORMATS
from fasttps.models.packed_module import PackedModule
from fasttps.models.weight_source import WeightSource
from tests.support.gguf_families import FAMILIES, greedy, prompt, tiny
from tests.support.gguf_writer import Kind, write

NEW_TOKENS = 24
KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0)


def load(path: Path, **options: Any) -> Any:
    return fasttps.load_gguf(path, dtype=torch.float32, **{"int8_activation": False, **options})


def assert_state(model: Any, expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit; a norm that was stored with 1 added has lost its last bits."""
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if "norm" in name:
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
        else:
            assert torch.equal(state[name], value), name


def assert_packed(model: Any, kind: Any) -> None:
    """Every matrix of a layer is held in the bits of the file, in a format, and the head too."""
    held = [module for module in model.modules() if isinstance(module, PackedModule)]
    assert {one.format for module in held for one in module.__dict__["packed"].values()} == {kind}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed_tokens" not in name:
            assert parameter.numel() == 0, name


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_same_greedy_tokens(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    expected = write(tmp_path / "m.gguf", model, family)
    assert_state(model, expected)
    loaded = load(tmp_path / "m.gguf", pack=False).model
    name = "LlamaForCausalLM" if family == "mistral" else type(model).__name__
    assert type(loaded).__name__ == name
    assert_state(loaded, expected)
    loaded.config._attn_implementation = "eager"
    ids = prompt()
    assert greedy(loaded, ids, NEW_TOKENS) == greedy(model, ids, NEW_TOKENS)


def test_the_same_greedy_tokens_with_a_cache(family: str, tmp_path: Path) -> None:
    """As it is loaded by default but for the dtype: patched as far as its family is."""
    model = tiny(family)
    write(tmp_path / "m.gguf", model, family)
    loaded = load(tmp_path / "m.gguf").model
    ids = prompt()
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    made = loaded.generate(ids, attention_mask=torch.ones_like(ids), **options)
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert made.tolist() == theirs.tolist()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_packed_is_what_the_file_holds(family: str, kind: Any, tmp_path: Path) -> None:
    expected = write(tmp_path / "m.gguf", tiny(family), family, lambda name: kind)
    packed, plain = load(tmp_path / "m.gguf"), load(tmp_path / "m.gguf", pack=False)
    assert_state(packed.model, expected)
    assert_state(plain.model, expected)
    ids = prompt()
    with torch.inference_mode():
        ours = packed.model(ids, use_cache=False).logits
        theirs = plain.model(ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    if kind.name in FORMATS:
        assert_packed(packed.model, FORMATS[kind.name][0])
    if kind in (Kind.Q8_0, Kind.Q4_0):
        packed.patch.undo()
        assert_state(packed.model, expected)


def test_the_source_of_an_undo_has_every_weight(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    expected = write(tmp_path / "m.gguf", model, family, lambda name: Kind.Q8_0)
    source = WeightSource(tmp_path / "m.gguf")
    source.check({name: tuple(value.shape) for name, value in expected.items()})
    for name, value in expected.items():
        torch.testing.assert_close(source.read(name), value, rtol=0, atol=1e-6)


def test_queries_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    """As ChatGLM's own checkpoints have them, with their biases, and as --fuse-qkv makes them."""
    for family in ("glm", "llama", "qwen2"):
        model = tiny(family)
        expected = write(tmp_path / "apart.gguf", model, family)
        joined = tmp_path / f"{family}.gguf"
        join_qkv(tmp_path / "apart.gguf", joined)
        assert_state(load(joined, pack=False).model, expected)
        assert_state(load(joined).model, expected)


def join_qkv(source: Path, path: Path) -> None:
    """Copy a file, the three projections of each layer in one tensor."""
    read = gguf.GGUFReader(source)
    arch = read.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, arch)
    for key, field in read.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    tensors = {tensor.name: tensor.data for tensor in read.tensors}
    for name, data in tensors.items():
        if ".attn_q." in name:
            parts = [tensors[name.replace("attn_q.", f"attn_{one}.")] for one in "qkv"]
            writer.add_tensor(name.replace("attn_q.", "attn_qkv."), np.concatenate(parts))
        elif not any(f".attn_{one}." in name for one in "kv"):
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_longrope_passes_its_boundary(tmp_path: Path) -> None:
    """Past the original context the long factors are taken, as transformers takes them."""
    model = tiny("phi3", original_max_position_embeddings=32, max_position_embeddings=96)
    model.config.rope_parameters["original_max_position_embeddings"] = 32
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    write(tmp_path / "m.gguf", model, "phi3")
    loaded = load(tmp_path / "m.gguf", pack=False).model
    loaded.config._attn_implementation = "eager"
    for length in (20, 32, 33, 60):
        ids = prompt(length)
        with torch.inference_mode():
            ours, theirs = (m(ids, use_cache=False).logits for m in (loaded, model))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def number(key: str, value: float) -> Any:
    return lambda writer: writer.add_float32(key, value)


def count(key: str, value: int) -> Any:
    return lambda writer: writer.add_uint32(key, value)


REFUSED = {
    "layers of GLM that predict": ("glm4", count("glm4.nextn_predict_layers", 1), "nextn_predict"),
    "another width of values": ("qwen3", count("qwen3.attention.value_length", 8), "values"),
    "a rotated part": ("qwen2", count("qwen2.rope.dimension_count", 4), "dimension_count"),
    "YaRN with a factor of its own": (
        "qwen2_yarn", number("qwen2.rope.scaling.yarn_attn_factor", 2.0), "yarn_attn_factor",
    ),
    "Granite without RoPE": (
        "granite", lambda writer: writer.add_rope_scaling_finetuned(False), "no RoPE",
    ),
    "a temperature without YaRN": (
        "mistral3", number("mistral3.attention.temperature_scale", 0.1), "without YaRN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_computes_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    family, metadata, message = REFUSED[name]
    write(tmp_path / "m.gguf", tiny(family), family, metadata=metadata)
    with pytest.raises(UnsupportedGguf, match=message):
        load(tmp_path / "m.gguf")


def test_a_layer_that_is_missing_among_the_others_is_told(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", tiny("qwen2"), "qwen2")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"blk.0.", b"blk.7."))
    with pytest.raises(BrokenGguf, match="counted from 0"):
        load(tmp_path / "m.gguf")


def test_an_unknown_architecture_is_told(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", tiny("qwen2"), "qwen2")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"qwen2", b"qwen9"))
    with pytest.raises(UnsupportedGguf, match=r"'qwen9'; those that are read are llama"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("family", ["lfm2", "gemma3", "phi3", "qwen3"])
def test_what_was_loaded_can_be_saved_and_mapped(family: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", tiny(family), family, lambda name: Kind.Q4_0)
    loaded = load(tmp_path / "m.gguf")
    fasttps.save(loaded.patch, tmp_path / "saved", tokenizer=loaded.tokenizer)
    mapped = fasttps.load(tmp_path / "saved")
    ids = prompt()
    with torch.inference_mode():
        ours, theirs = (m(ids, use_cache=False).logits for m in (mapped, loaded.model))
    assert torch.equal(ours, theirs)
