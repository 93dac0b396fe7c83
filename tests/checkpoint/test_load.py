"""Quantised checkpoints as patched models: the tokens of the dequantised ones, undo, copies."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch

import fasttps
from fasttps import ops
from fasttps.checkpoint import BrokenCheckpoint
from fasttps.models.packed_linear import PackedLinear
from fasttps.packed_model.tensor_file import TensorFile, write_tensors
from tests.support.checkpoints import (
    FILE,
    NAMES,
    copy_of,
    edit_config,
    edit_tensors,
    fixture,
    least_lead,
)
from tests.support.llama import cache_name

ACT_ORDER = "gptq-act-order"
GATE, UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
PROMPTS = [[5, 9, 77, 30, 8], [200, 3, 3, 120, 41, 9, 66], [17]]


def load(folder, **options):
    return fasttps.load_checkpoint(
        folder, **{"dtype": torch.float32, "int8_activation": False, **options}
    )


@pytest.fixture(scope="module", params=NAMES)
def loaded(request):
    """A fixture with float activations, and the same dequantised to float32, unpatched."""
    folder = fixture(request.param)
    made = load(folder)
    plain = load(folder, pack=False)
    assert plain.patch is None
    return SimpleNamespace(name=request.param, plain=plain.model, **made._asdict())


def assert_same_state(model, other):
    state, wanted = model.state_dict(), other.state_dict()
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(state[key], value), key


def logits_of(model, ids=(5, 9, 77, 30, 8)):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits


def test_every_weight_is_the_dequantised_one(loaded):
    assert_same_state(loaded.model, loaded.plain)


def test_greedy_tokens_are_those_of_the_dequantised_model(loaded):
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        exact = loaded.plain.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=-1)
        assert least_lead(loaded.plain, exact, len(prompt)) > 1e-4
        made = fasttps.generate(loaded.model, ids, max_new_tokens=48, stop_token_ids=[])
        assert made.token_ids[0] == exact[0, len(prompt) :].tolist()
        cache = fasttps.StaticKVCache(loaded.model.config, max_seq_len=64)
        out = loaded.model.generate(
            ids,
            **{cache_name(loaded.model): cache},
            max_new_tokens=48,
            do_sample=False,
            eos_token_id=-1,
        )
        assert torch.equal(out, exact)


def test_a_left_padded_batch_too(loaded):
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "eos_token_id": -1}
    assert torch.equal(loaded.model.generate(ids, **options), loaded.plain.generate(ids, **options))


def test_a_token_is_one_op(loaded):
    cache = fasttps.StaticKVCache(loaded.model.config, max_seq_len=16)
    with torch.inference_mode():
        for ids in ([[5, 9, 77]], [[8]]):
            loaded.model(torch.tensor(ids), **{cache_name(loaded.model): cache})
    assert loaded.model.why_not is None


def test_int8_activations_are_near(loaded):
    made = load(fixture(loaded.name), int8_activation=True)
    exact = logits_of(loaded.plain)
    difference = (logits_of(made.model) - exact).abs().max()
    assert difference < 0.05 * exact.abs().max()
    if "float32" not in loaded.name:
        assert difference > 0
        assert all(w.int8_activation for w in (made.model.model.layers[0].mlp.packed_down,))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_dtype_of_what_is_not_quantised(dtype):
    model, tokenizer, patch = load(fixture("ct-int4-zero"), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype or torch.bfloat16}
    assert model.config.dtype == model.dtype and tokenizer("hello").input_ids
    assert not hasattr(model.config, "quantization_config")
    assert "INT4_ZERO in groups of 32" in str(patch.report())
    assert logits_of(model).isfinite().all()


def test_undo_dequantises_from_the_folder(loaded):
    made = load(fixture(loaded.name))
    made.patch.undo()
    assert type(made.model) is type(loaded.plain)
    assert_same_state(made.model, loaded.plain)
    assert torch.equal(logits_of(made.model), logits_of(loaded.plain))


def test_save_and_load(loaded, tmp_path):
    fasttps.save(loaded.model, tmp_path)
    again = fasttps.load(tmp_path)
    assert_same_state(again, loaded.plain)
    assert torch.equal(logits_of(again), logits_of(loaded.model))


def test_a_copy_runs_alike(loaded):
    copied = copy.deepcopy(loaded.model)
    assert torch.equal(logits_of(copied), logits_of(loaded.model))


@pytest.mark.parametrize("part", ["gate_proj", "down_proj", "all"])
def test_weights_that_come_later(part):
    """Gate and up lie in the order of down's columns: one of them alone must not break that."""
    made = load(fixture(ACT_ORDER))
    plain = load(fixture(ACT_ORDER), pack=False).model
    state = {key: 0.5 * w for key, w in plain.state_dict().items() if part in key or part == "all"}
    for model in (made.model, plain):
        model.load_state_dict(state, strict=False)
    assert_same_state(made.model, plain)
    torch.testing.assert_close(logits_of(made.model), logits_of(plain), rtol=1e-5, atol=1e-5)


def with_biases(tensors):
    generator = torch.Generator().manual_seed(0)
    for name in (GATE, UP, DOWN):
        rows = tensors[f"{name}.scales"].shape[1]
        tensors[f"{name}.bias"] = torch.randn(rows, generator=generator).half()


@pytest.mark.parametrize("states", [True, False], ids=["in_the_config", "in_the_file_alone"])
def test_biases_follow_the_rows_of_act_order(tmp_path, states):
    folder = edit_tensors(copy_of("gptq-v2", tmp_path), with_biases)
    if states:
        edit_config(folder, lambda config: config.update(mlp_bias=True))
    made, plain = load(folder), load(folder, pack=False)
    biased = plain.model.model.layers[0].mlp.gate_proj.bias
    assert biased is not None and bool(biased.any())
    torch.testing.assert_close(logits_of(made.model), logits_of(plain.model), rtol=1e-5, atol=1e-5)
    without = load(fixture("gptq-v2"), pack=False)
    assert not torch.allclose(logits_of(plain.model), logits_of(without.model), atol=1e-2)


def test_biases_of_zero_are_no_biases(tmp_path):
    """As auto-gptq has written them for models that have none."""

    def zeros(tensors):
        for name in (GATE, UP, DOWN):
            tensors[f"{name}.bias"] = torch.zeros(tensors[f"{name}.scales"].shape[1]).half()

    folder = edit_tensors(copy_of("gptq-auto-gptq", tmp_path), zeros)
    assert load(folder).model.model.layers[0].mlp.gate_proj.bias is None


def reverse_groups(*names):
    def edit(tensors):
        for name in names:
            tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"].flip(0)

    return edit


def lopsided(tensors):
    """Groups of several sizes."""
    tensors[f"{DOWN}.g_idx"][tensors[f"{DOWN}.g_idx"] == 1] = 0


def without_order(tensors):
    for key in [key for key in tensors if key.endswith("g_idx")]:
        del tensors[key]


@pytest.mark.parametrize(
    "edit, fused",
    [
        (reverse_groups(GATE), "F32"),
        (reverse_groups(GATE, UP), "INT4_ZERO"),
        (reverse_groups(DOWN), "INT4_ZERO"),
        (lopsided, "INT4_ZERO"),
        (without_order, "INT4_ZERO"),
    ],
    ids=["gate_unlike_up", "gate_and_up", "down", "lopsided_down", "no_g_idx"],
)
def test_orders_of_every_kind(tmp_path, edit, fused):
    folder = edit_tensors(copy_of("gptq-v2", tmp_path), edit)
    made, plain = load(folder), load(folder, pack=False)
    assert_same_state(made.model, plain.model)
    torch.testing.assert_close(logits_of(made.model), logits_of(plain.model), rtol=1e-5, atol=1e-5)
    mlp = made.model.model.layers[0].mlp
    assert mlp.packed_gate_up.format.name == fused
    lost = edit is lopsided
    assert (mlp.packed_down.format == ops.PackedFormat.F32) == (lost or fused == "F32")


def test_act_order_of_a_fused_gate_and_up(tmp_path):
    """Phi-3's gate and up are one linear: the halves of its rows move, each by itself."""
    folder = copy_of("gptq-v2", tmp_path)
    names = {
        "qkv_proj": [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"],
        "gate_up_proj": [GATE, UP],
    }

    def join(tensors):
        for fused, parts in names.items():
            base = parts[0].rpartition(".")[0]
            for part in ("qweight", "qzeros", "scales", "g_idx"):
                of = [tensors.pop(f"{name}.{part}") for name in parts]
                tensors[f"{base}.{fused}.{part}"] = of[0] if part == "g_idx" else torch.cat(of, 1)

    def as_phi3(config):
        phi3 = json.loads((fixture("awq-phi3") / "config.json").read_text())
        config.update(phi3 | {"quantization_config": config["quantization_config"]})

    edit_config(edit_tensors(folder, join), as_phi3)
    made, plain = load(folder), load(folder, pack=False)
    mlp = made.model.model.layers[0].mlp
    assert mlp.packed_gate_up.columns is not None
    assert mlp.row_order(mlp.slots[0]) is not None
    assert_same_state(made.model, plain.model)
    torch.testing.assert_close(logits_of(made.model), logits_of(plain.model), rtol=1e-5, atol=1e-5)


def test_linears_that_no_family_knows(tmp_path):
    """StableLM is not fused, and its quantised linears are packed all the same."""
    transformers = pytest.importorskip("transformers")
    config = transformers.StableLmConfig(
        vocab_size=262,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.StableLmForCausalLM(config).half()
    model.save_pretrained(tmp_path)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def quantise(tensors):
        generator = torch.Generator().manual_seed(1)
        for key in [k for k in tensors if k.split(".")[-2] in names and k.endswith("weight")]:
            rows, cols = tensors.pop(key).shape
            base = key.removesuffix(".weight")
            words = {"qweight": (cols, rows // 8), "qzeros": (cols // 32, rows // 8)}
            for part, shape in words.items():
                bytes_ = torch.randint(256, (*shape, 4), generator=generator, dtype=torch.uint8)
                tensors[f"{base}.{part}"] = bytes_.view(torch.int32)[..., 0]
            tensors[f"{base}.scales"] = torch.full((cols // 32, rows), 0.01).half()

    edit_tensors(tmp_path, quantise)
    scheme = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    edit_config(tmp_path, lambda config: config.update(quantization_config=scheme))
    made, plain = load(tmp_path), load(tmp_path, pack=False)
    assert made.tokenizer is None
    assert sum(isinstance(m, PackedLinear) for m in made.model.modules()) == len(names)
    torch.testing.assert_close(logits_of(made.model), logits_of(plain.model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [ACT_ORDER, "awq-qwen2"])
def test_compiles_in_one_graph(name):
    model = load(fixture(name)).model
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert torch.equal(compiled(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", [ACT_ORDER, "awq-phi3"])
def test_save_pretrained_writes_the_dequantised_model(name, tmp_path):
    from transformers import AutoModelForCausalLM

    load(fixture(name)).model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not hasattr(again.config, "quantization_config")
    assert_same_state(again, load(fixture(name), pack=False).model)


def test_another_dtype_leaves_the_quants(tmp_path):
    model = load(fixture(ACT_ORDER)).model
    exact = logits_of(model)
    before = model.model.layers[0].mlp.packed_gate_up.packed
    model.to(torch.bfloat16)
    assert model.model.layers[0].mlp.packed_gate_up.packed is before
    made = logits_of(model)
    assert made.dtype == torch.bfloat16
    assert (made - exact).abs().max() < 0.03 * exact.abs().max()


def test_shards(tmp_path):
    """A folder of several files, the parts of a weight in any of them."""
    folder = copy_of("gptq-sym", tmp_path)
    file = TensorFile(folder / FILE)
    names = sorted(file.names)
    places = {}
    for at in range(3):
        shard = {name: file.tensor(name) for name in names[at::3]}
        write_tensors(folder / f"model-{at + 1:05}-of-00003.safetensors", shard)
        places |= dict.fromkeys(shard, f"model-{at + 1:05}-of-00003.safetensors")
    (folder / FILE).unlink()
    plain = load(fixture("gptq-sym"), pack=False).model
    assert_same_state(load(folder).model, plain)
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": places}))
    write_tensors(folder / "consolidated.safetensors", {"wq": torch.zeros(3)})
    assert_same_state(load(folder).model, plain)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BrokenCheckpoint, match="lacks model-00002-of-00003"):
        load(folder)


def test_progress_names_every_module():
    calls = []
    load(fixture("awq"), progress=lambda *call: calls.append(call))
    done, total, names = zip(*calls)
    assert list(done) == list(range(1, len(calls) + 1)) and set(total) == {len(calls)}
    assert "model.layers.1.mlp" in names


def test_wrong_arguments():
    with pytest.raises(TypeError, match="load_checkpoint: dtype wanted"):
        load(fixture("awq"), dtype=torch.int8)
    with pytest.raises(ValueError, match="load_checkpoint: kv wanted None"):
        load(fixture("awq"), pack=False, kv="int8")


def test_int8_caches():
    made = load(fixture("awq"), kv="int8")
    cache = made.patch.cache(16)
    with torch.inference_mode():
        made.model(torch.tensor([PROMPTS[0]]), **{cache_name(made.model): cache})
    assert cache.layers[0].keys.dtype == torch.int8
