"""A GGUF file that keeps its bits: the packed model says what the dequantised one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import fasttps
from fasttps import ops
from tests.support import gguf_files
from tests.support.gguf_files import Kind, write_llama
from tests.support.llama import cache_name
from tests.support.memory import measured
from tests.support.smollm2 import smollm2_tokenizer

PACKED = {
    Kind.Q4_0: ops.PackedFormat.INT4,
    Kind.Q4_1: ops.PackedFormat.INT4_MIN,
    Kind.Q8_0: ops.PackedFormat.INT8_GROUP,
    Kind.Q4_K: ops.PackedFormat.Q4_K,
    Kind.Q6_K: ops.PackedFormat.Q6_K,
}
IDS = torch.tensor([[5, 40, 7, 99, 200, 3, 150, 17]])


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    options = {"int8_activation": False, **options}
    return fasttps.load_gguf(path, dtype=dtype, **options)


@torch.inference_mode()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Of a prefill, and of the last two tokens decoded one by one."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    pieces = [ids[:, :-2], ids[:, -2:-1], ids[:, -1:]]
    name = cache_name(model)
    return torch.cat([model(piece, **{name: cache}).logits for piece in pieces], dim=1)


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_every_format_against_float64(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "m.gguf"
    expected = write_llama(path, lambda name: kind)
    model = load(path).model
    for layer in model.model.layers:
        mlp, attention = layer.mlp, layer.self_attn
        heads = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        held = [head.packed_weight for head in heads] + [mlp.packed_gate_up, mlp.packed_down]
        assert {weight.format for weight in held} == {PACKED[kind]}
    assert model.lm_head.packed_weight.format == PACKED[kind]
    state = model.state_dict()  # unpacked
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    plain = load(path, pack=False, int8_activation=True).model
    exact = logits(plain.double())
    # Each op is held to twice torch's error in its own tests; here layers pass it on.
    ours = (logits(model) - exact).norm()
    theirs = (logits(plain.float()) - exact).norm()
    assert 0 < ours <= 3 * theirs


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_int8_activations_change_the_logits_little(tmp_path: Path, kind: Any) -> None:
    """127 steps to the largest of 32: a layer's product is off by about 0.4 % of its size."""
    write_llama(tmp_path / "m.gguf", lambda name: kind)
    exact = logits(load(tmp_path / "m.gguf").model)
    rounded = logits(load(tmp_path / "m.gguf", int8_activation=True).model)
    assert 0 < (rounded - exact).norm() < 0.05 * exact.norm()


def test_types_are_mixed_as_files_mix_them(tmp_path: Path) -> None:
    """Those without a format, and gate and up of different types, are held in the model's dtype."""

    def kind_of(name: str) -> Any:
        for part, kind in {
            "v_proj": Kind.Q6_K,
            "0.mlp.gate_proj": Kind.Q4_K,
            "0.mlp.up_proj": Kind.Q6_K,
            "1.mlp.down_proj": Kind.F16,
            "k_proj": Kind.Q5_K,
            "embed_tokens": Kind.Q6_K,
        }.items():
            if part in name:
                return kind
        return Kind.Q4_K

    expected = write_llama(tmp_path / "m.gguf", kind_of)
    loaded = load(tmp_path / "m.gguf", torch.bfloat16)
    first, second = loaded.model.model.layers
    dense = ops.PackedFormat.BF16
    assert first.mlp.packed_gate_up.format == dense
    assert first.mlp.packed_down.format == ops.PackedFormat.Q4_K
    assert second.mlp.packed_gate_up.format == ops.PackedFormat.Q4_K
    assert second.mlp.packed_down.format == dense
    assert first.self_attn.k_proj.packed_weight.format == dense
    assert first.self_attn.v_proj.packed_weight.format == ops.PackedFormat.Q6_K
    state = loaded.model.state_dict()
    for name, value in expected.items():
        assert torch.equal(state[name], value.bfloat16()), name
    assert "Q4_K" in str(loaded.patch.report())


def test_an_untied_embedding_and_biases(tmp_path: Path) -> None:
    made = gguf_files.config(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    write_llama(tmp_path / "m.gguf", lambda name: Kind.Q8_0, made)
    packed, plain = load(tmp_path / "m.gguf"), load(tmp_path / "m.gguf", pack=False)
    torch.testing.assert_close(logits(packed.model), logits(plain.model), rtol=1e-4, atol=1e-4)


def test_undo_dequantises_what_the_file_has(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", lambda name: Kind.Q4_1)
    packed = load(tmp_path / "m.gguf", torch.bfloat16)
    plain = load(tmp_path / "m.gguf", torch.bfloat16, pack=False).model
    assert packed.patch.is_exact
    packed.patch.undo()
    assert packed.model.lm_head.weight is packed.model.model.embed_tokens.weight
    state = packed.model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    assert torch.equal(logits(packed.model), logits(plain))


def test_another_dtype_keeps_the_bits(tmp_path: Path) -> None:
    expected = write_llama(tmp_path / "m.gguf", lambda name: Kind.Q4_K)
    model = load(tmp_path / "m.gguf", torch.bfloat16).model.float()
    assert model.lm_head.packed_weight.format == ops.PackedFormat.Q4_K
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[name], expected[name])


def test_the_caches_it_asks_for(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", lambda name: Kind.Q8_0)
    loaded = load(tmp_path / "m.gguf", kv="int8")
    made = fasttps.generate(loaded.model, IDS, max_new_tokens=2, cache=loaded.patch.cache(16))
    assert len(made.token_ids[0]) == 2
    with pytest.raises(ValueError, match="kv wanted"):
        load(tmp_path / "m.gguf", kv="int3")
    with pytest.raises(ValueError, match="pack=False"):
        load(tmp_path / "m.gguf", kv="int8", pack=False)


MEASURE = """
import torch, fasttps
fasttps.load_gguf(sys.argv[1])  # what is imported and made once

begin()
loaded = fasttps.load_gguf(sys.argv[2])
packed = {b.data_ptr(): b.nbytes for b in loaded.model.buffers()}
counted = sum(packed.values())
"""


def test_loading_takes_the_packed_weights_and_one_more(tmp_path: Path) -> None:
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    write_llama(small, lambda name: Kind.Q8_0)
    made = gguf_files.config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=3)
    write_llama(large, lambda name: Kind.Q8_0, made)
    peak, after, packed = measured(MEASURE, small, large)
    assert packed > 40 << 20
    # Gate and up of one layer exist as blocks, apart, and as one.
    assert peak < packed + 4 * made.hidden_size * made.intermediate_size * 2 + (8 << 20)
    assert after < 1.1 * packed


@pytest.fixture(scope="module")
def smollm2_file() -> Path:
    from fasttps.cli.demo import smollm2_path

    smollm2_tokenizer()  # skips where the package is not installed
    return smollm2_path()


def test_smollm2_takes_the_bytes_of_its_file(smollm2_file: Path) -> None:
    model = load(smollm2_file).model
    held = {buffer.data_ptr(): buffer.nbytes for buffer in model.buffers()}
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    # Beside the weights the file has the vocabulary.
    assert sum(held.values()) + parameters < 1.001 * smollm2_file.stat().st_size


@pytest.mark.slow
def test_smollm2_is_what_transformers_reads(smollm2_file: Path) -> None:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate", reason="the accelerate package is not installed")
    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2_file.parent, gguf_file=smollm2_file.name, dtype=torch.float32
    ).state_dict()
    for state in (load(smollm2_file, pack=False), load(smollm2_file)):
        ours = state.model.state_dict()
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
