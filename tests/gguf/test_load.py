"""`fasttps.load_gguf` on small files: values, shapes, RoPE, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import fasttps
from fasttps.gguf import BrokenGguf, UnsupportedGguf
from tests.support import gguf_files
from tests.support.gguf_files import Kind, write_llama
from tests.support.gguf_writer import llama3_factors

ALL = [
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0,
    Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
]  # fmt: skip


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return fasttps.load_gguf(path, dtype=dtype, pack=False).model


def assert_state(model: Any, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_the_values_of_every_type(tmp_path: Path, kind: Any) -> None:
    expected = write_llama(tmp_path / "m.gguf", lambda name: kind)
    model = load(tmp_path / "m.gguf")
    assert_state(model, expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training


@pytest.mark.parametrize("alignment", [8, 16, 64])
def test_the_alignment_of_the_file_is_obeyed(tmp_path: Path, alignment: int) -> None:
    expected = write_llama(tmp_path / "m.gguf", lambda name: Kind.Q4_0, alignment=alignment)
    assert_state(load(tmp_path / "m.gguf"), expected)


def test_an_untied_head_and_biases(tmp_path: Path) -> None:
    made = gguf_files.config(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    expected = write_llama(tmp_path / "m.gguf", lambda name: Kind.Q8_0, made)
    model = load(tmp_path / "m.gguf")
    assert_state(model, expected)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_the_rows_of_keys_are_ordered_by_their_own_head_count(tmp_path: Path) -> None:
    """4 heads of 8 and 2 kv heads: with the heads of the queries, the rows would mix."""
    made = gguf_files.config(
        hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_hidden_layers=1,
    )  # fmt: skip
    stored = np.array([0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15], dtype=np.float32)
    rows = np.repeat(stored[:, None], 32, axis=1)
    write_llama(
        tmp_path / "m.gguf", lambda name: Kind.F32, made, drop="blk.0.attn_k.weight",
        extra={"blk.0.attn_k.weight": rows},
    )  # fmt: skip
    keys = load(tmp_path / "m.gguf").model.layers[0].self_attn.k_proj.weight
    assert keys[:, 0].tolist() == list(range(16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_round_once(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = write_llama(tmp_path / "m.gguf", lambda name: Kind.Q4_K)
    model = load(tmp_path / "m.gguf", dtype)
    assert_state(model, {name: value.to(dtype) for name, value in expected.items()})
    assert model.dtype == model.config.dtype == dtype
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_rope_of_llama_3_is_recognised(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    made = gguf_files.config(rope_parameters=rope)
    factors = llama3_factors(32, 5e5, 32.0)
    assert len(set(factors.tolist())) > 2
    write_llama(
        tmp_path / "m.gguf", lambda name: Kind.Q8_0, made, extra={"rope_freqs.weight": factors}
    )
    model = load(tmp_path / "m.gguf")
    assert model.config.rope_parameters == rope
    plain = 1 / 5e5 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, plain / torch.tensor(factors))


def test_linear_rope_scaling(tmp_path: Path) -> None:
    def scaling(writer: Any) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 4.0)

    write_llama(tmp_path / "m.gguf", lambda name: Kind.Q8_0, metadata=scaling)
    frequencies = load(tmp_path / "m.gguf").model.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, 1e4 ** -(torch.arange(0, 32, 2) / 32) / 4)


def test_every_end_token_ends_an_answer(tmp_path: Path) -> None:
    write_llama(
        tmp_path / "m.gguf",
        lambda name: Kind.Q8_0,
        metadata=lambda writer: writer.add_uint32("tokenizer.ggml.eot_token_id", 2),
    )
    assert load(tmp_path / "m.gguf").generation_config.eos_token_id == [0, 2]


def uint32(key: str, value: int) -> Callable[[Any], None]:
    return lambda writer: writer.add_uint32(key, value)


def change(path: Path, key: str, value: int) -> None:
    """Overwrite a u32 of the metadata."""
    data = bytearray(path.read_bytes())
    at = data.index(key.encode()) + len(key) + 4
    struct.pack_into("<I", data, at, value)
    path.write_bytes(data)


REFUSED = {
    "experts": (uint32("llama.expert_count", 8), "expert_count"),
    "one file of three": (lambda writer: writer.add_uint16("split.count", 3), "one of 3 files"),
    "an unknown RoPE scaling": (
        lambda writer: writer.add_string("llama.rope.scaling.type", "own"),
        "'own'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_has_no_llama_for_is_refused(tmp_path: Path, name: str) -> None:
    metadata, message = REFUSED[name]
    write_llama(tmp_path / "m.gguf", lambda name: Kind.Q8_0, metadata=metadata)
    with pytest.raises(UnsupportedGguf, match=message):
        load(tmp_path / "m.gguf")


def test_factors_of_rope_that_are_not_llama_3s_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 16, dtype=np.float32)
    write_llama(tmp_path / "m.gguf", lambda name: Kind.Q8_0, extra={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedGguf, match="not Llama 3's"):
        load(tmp_path / "m.gguf")


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(32, dtype=np.float32)}
    write_llama(tmp_path / "m.gguf", lambda name: Kind.Q8_0, extra=extra)
    with pytest.raises(UnsupportedGguf, match="attn_q_norm"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("token_embd.weight", "token_embd"),
        ("blk.1.ffn_up.weight", "mlp.up_proj"),
        ("blk.0.attn_norm.weight", "layers.0.input_layernorm"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, message: str) -> None:
    write_llama(tmp_path / "m.gguf", lambda name: Kind.Q8_0, drop=name)
    with pytest.raises(BrokenGguf, match=message):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 2**31 - 1, "layers"),
        ("llama.block_count", 2**32 - 1, "block_count"),
        ("llama.block_count", 1, "layers"),
        ("llama.attention.head_count", 0, "head_count"),
        ("llama.attention.head_count", 2**30, "head"),
        ("llama.attention.head_count_kv", 3, "kv heads"),
        ("llama.attention.key_length", 2**30, "head"),
        ("llama.embedding_length", 128, "shape"),
        ("llama.feed_forward_length", 2**30, "shape"),
        ("llama.context_length", 0, "context_length"),
        ("tokenizer.ggml.bos_token_id", 2**31, "bos_token_id"),
    ],
)
def test_metadata_that_do_not_fit_are_an_error(
    tmp_path: Path, key: str, value: int, message: str
) -> None:
    write_llama(tmp_path / "m.gguf", lambda name: Kind.Q8_0)
    change(tmp_path / "m.gguf", key, value)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "m.gguf")


def test_a_wrong_dtype_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"dtype wanted.*float64"):
        fasttps.load_gguf(tmp_path / "m.gguf", dtype=torch.float64)


def test_a_file_that_is_cut_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    from fasttps.gguf.header import read_header
    from fasttps.gguf.load import How, load_with

    path = tmp_path / "m.gguf"
    write_llama(path, lambda name: Kind.Q8_0)
    header = read_header(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(BrokenGguf, match="cut short"):
        load_with(path, header, How(torch.float32), None)
