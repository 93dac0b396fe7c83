"""Weights that are rounded as they are packed, and what `undo` then can and cannot do."""

from __future__ import annotations

import copy

import pytest
import torch

import fasttps
from fasttps.models.fused_module import FusedModule
from tests.support.errors import bits
from tests.support.llama import FUSED_MODULES, generate, logits, prompt, tiny_llama

KINDS = ["int8", "int4"]
# Of the logits' own size: a weight is off by half a step of its scale at most.
RELATIVE = {"bf16": 0.02, "int8": 0.06, "int4": 0.4}


def cosine(ours, theirs):
    return torch.nn.functional.cosine_similarity(
        ours.double().flatten(), theirs.double().flatten(), dim=0
    ).item()


def off(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def state_of(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(state, other):
    return list(state) == list(other) and all(
        torch.equal(bits(state[key]), bits(other[key])) for key in state
    )


def is_patched(model):
    return any(isinstance(module, FusedModule) for module in model.modules())


def layer_weight(name, layer=1):
    return f"model.layers.{layer}.{name}.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["bf16", *KINDS])
def test_a_quantised_model_says_nearly_the_same(weights, dtype):
    model = tiny_llama(dtype=dtype)
    theirs = logits(model, prompt(2, 9)).float()
    patch = fasttps.patch(model, weights)
    assert len(patch.report().fused) == FUSED_MODULES
    assert patch.is_exact == (weights == "bf16" and dtype == torch.bfloat16)
    ours = logits(model, prompt(2, 9))
    assert ours.dtype == dtype
    assert off(ours.float(), theirs) < RELATIVE[weights]
    cache = fasttps.StaticKVCache(model.config, 9)
    again = logits(model, prompt(2, 9), cache=cache).float()
    assert off(again, theirs) < RELATIVE[weights]


@pytest.mark.parametrize("weights", KINDS)
def test_activations_stay_as_they_are_if_asked(weights):
    """With the weights that the packed ones stand for, and nothing else rounded."""
    model, plain = tiny_llama(), tiny_llama()
    fasttps.patch(model, weights, int8_activation=False)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(
        logits(model, prompt(2, 9)), logits(plain, prompt(2, 9)), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("group_size", [None, 32, 64, 128])
def test_group_sizes(group_size):
    """48 and 88 columns are no multiple of any of them."""
    model = tiny_llama()
    fasttps.patch(model, "int4", group_size=group_size)
    packed = model.model.layers[0].self_attn.q_proj.packed_weight
    assert packed.format == fasttps.ops.PackedFormat.INT4
    assert packed.group_size == (group_size or 32) and packed.int8_activation
    assert "INT4 in groups of" in repr(model.model.layers[0].mlp)


def test_int8_in_groups_is_closer_than_in_rows():
    def errors(**options):
        model = tiny_llama()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        fasttps.patch(model, "int8", **options)
        assert model.lm_head.packed_weight.format == fasttps.ops.PackedFormat[expected]
        state = model.state_dict()
        return sum(float((state[name] - value).norm() ** 2) for name, value in weights.items())

    expected = "INT8"
    rows = errors(group_size=0)
    expected = "INT8_GROUP"
    assert 0 < errors() < 0.8 * rows


def test_the_head_in_a_format_of_its_own():
    model = tiny_llama(tie_word_embeddings=True)
    patch = fasttps.patch(model, "int4", lm_head="int8")
    assert "model.embed_tokens (Embedding) -> packed_embedding, INT8_GROUP in groups of 32" in str(
        patch.report()
    )
    assert model.lm_head.packed_weight.format == fasttps.ops.PackedFormat.INT8_GROUP
    assert model.model.layers[0].mlp.packed_down.format == fasttps.ops.PackedFormat.INT4
    other = tiny_llama()
    patch = fasttps.patch(other, lm_head="int8")
    assert [entry.name for entry in patch.report().fused if entry.lossy] == ["lm_head"]


def test_biases_are_not_rounded():
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    biases = {key: value for key, value in state_of(model).items() if key.endswith("bias")}
    theirs = logits(model, prompt(2, 9))
    fasttps.patch(model, "int8")
    assert off(logits(model, prompt(2, 9)), theirs) < RELATIVE["int8"]
    assert same(biases, {key: value for key, value in state_of(model).items() if key in biases})


# --- undo ---


@pytest.mark.parametrize("weights", ["bf16", *KINDS])
def test_undo_of_a_lossy_patch_is_refused(weights):
    model = tiny_llama()
    patch = fasttps.patch(model, weights)
    ours = logits(model, prompt(1, 9))
    assert not patch.is_exact
    for _ in range(2):
        with pytest.raises(fasttps.PatchError, match=r"model\.layers\.\[0-2\]\.mlp.*lm_head are"):
            patch.undo()
    assert torch.equal(logits(model, prompt(1, 9)), ours)
    assert f"{FUSED_MODULES} modules fused, 0 skipped; undo is not possible" in str(patch.report())
    name = {"bf16": "BF16", "int8": "INT8_GROUP in groups of 32", "int4": "INT4 in groups of 32"}[
        weights
    ]
    assert f"lm_head (Linear) -> packed_linear, {name} (lossy)" in str(patch.report())


def test_a_lossy_patch_is_no_context_manager():
    model = tiny_llama()
    patch = fasttps.patch(model, "int8")
    with pytest.raises(fasttps.PatchError, match="at the end of a with block"), patch:
        raise AssertionError("the block began")


@pytest.mark.parametrize("weights", [None, "bf16", *KINDS])
@pytest.mark.parametrize("tied", [True, False])
def test_kept_originals_come_back_bit_for_bit(weights, tied):
    model = tiny_llama(tie_word_embeddings=tied)
    model.lm_head.weight.data[0, :3] = torch.tensor([-0.0, 1e-40, 65504.0])
    parameters, before = dict(model.named_parameters()), state_of(model)
    theirs = logits(model, prompt(2, 9))
    with fasttps.patch(model, weights, keep_original=True) as patch:
        assert patch.is_exact
        assert ("the originals are kept" in str(patch.report())) == (weights is not None)
        logits(model, prompt(2, 9))
    assert not is_patched(model)
    assert same(state_of(model), before)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameters[name] is value for name, value in model.named_parameters())
    assert torch.equal(logits(model, prompt(2, 9)), theirs)


def test_bf16_values_in_float32_are_exact_in_bf16():
    """Exact is judged by the values: these come back as they were."""
    model = tiny_llama(dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    before = state_of(model)
    with fasttps.patch(model, "bf16") as patch:
        assert patch.is_exact
        assert logits(model, prompt(1, 3)).dtype == torch.float32
    assert same(state_of(model), before)


@pytest.fixture
def folder(tmp_path):
    model = tiny_llama(tie_word_embeddings=True, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="40KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    return tmp_path / "model", model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_source_gives_the_weights_back(folder, dtype):
    path, model = folder
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    before = state_of(model)
    patch = fasttps.patch(model, "int4", source=path)
    assert patch.is_exact and f"undo is exact, from {path}" in str(patch.report())
    patch.undo()
    assert same(state_of(model), before) and not is_patched(model)


def test_a_source_of_a_model_without_head(folder):
    path, model = folder
    before = state_of(model.model)
    with fasttps.patch(model.model, "int8", source=str(path)):
        logits(model.model, prompt(1, 3))
    assert same(state_of(model.model), before)


def test_a_gguf_source_gives_the_weights_back(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed")
    from tests.support.tiny_folder import save_gguf, save_llama

    model = save_llama(tmp_path / "model")
    save_gguf(tmp_path / "model.gguf", model)
    before = state_of(model)
    with fasttps.patch(model, "int4", source=tmp_path / "model.gguf") as patch:
        assert patch.is_exact
    assert same(state_of(model), before)


def test_sources_that_are_none(folder, tmp_path):
    path, model = folder
    other = tiny_llama(5, dtype=torch.bfloat16, tie_word_embeddings=True)
    small = tiny_llama(5, dtype=torch.bfloat16, num_hidden_layers=4)
    (tmp_path / "file").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\xff" * 9)
    for patched, source, message in (
        (other, path, "wanted the values of the model, got others in"),
        (small, path, r"wanted model\.layers\.3\..*, got no such weight"),
        (model, tmp_path / "file", "neither a folder nor a GGUF"),
        (model, tmp_path / "empty", "has no safetensors"),
        (model, tmp_path / "broken", "cannot be read"),
        (model, tmp_path / "none", "cannot be read"),
    ):
        before = state_of(patched)
        with pytest.raises(fasttps.PatchError, match=message):
            fasttps.patch(patched, "int8", source=source)
        assert not is_patched(patched) and same(state_of(patched), before)
    with pytest.raises(TypeError, match="source wanted a path, got int"):
        fasttps.patch(model, "int8", source=3)


def test_a_source_that_is_gone_at_undo(folder):
    path, model = folder
    patch = fasttps.patch(model, "int8", source=path)
    for file in path.glob("*.safetensors"):
        file.rename(file.with_suffix(".away"))
    with pytest.raises(fasttps.PatchError, match="has no safetensors"):
        patch.undo()
    assert is_patched(model)
    for file in path.glob("*.away"):
        file.rename(file.with_suffix(".safetensors"))
    patch.undo()
    assert not is_patched(model)


def test_a_failure_midway_says_what_is_lost():
    """Without an original there is no way back for what was rounded already."""
    model = tiny_llama()
    before = state_of(model)

    def interrupted(done, total, name):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fasttps.patch(model, "int8", progress=interrupted)
    (note,) = caught.value.__notes__
    assert "model.layers.0.self_attn.q_proj" in note and "load the model again" in note
    assert not is_patched(model)
    now = state_of(model)
    changed = {key for key in before if not torch.equal(before[key], now[key])}
    assert changed == {layer_weight(f"self_attn.{name}_proj", 0) for name in "qkv"}
    with pytest.raises(KeyboardInterrupt) as caught:
        fasttps.patch(tiny_llama(), "int8", keep_original=True, progress=interrupted)
    assert not getattr(caught.value, "__notes__", [])


# --- weights that change under a lossy patch ---


def test_the_state_holds_what_the_weights_stand_for():
    """In the dtype of the model, under the original keys; a fresh model takes it."""
    model = tiny_llama(tie_word_embeddings=True, dtype=torch.bfloat16)
    before = state_of(model)
    fasttps.patch(model, "int8")
    state = model.state_dict()
    assert list(state) == list(before)
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    for key, value in state.items():
        assert off(value.float(), before[key].float()) < 0.02
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]


@pytest.mark.parametrize("keep_original", [True, False])
def test_weights_that_are_loaded_are_quantised(keep_original):
    model, other = tiny_llama(0), tiny_llama(1)
    state = state_of(other)
    patch = fasttps.patch(model, "int8", keep_original=keep_original)
    model.load_state_dict(state)
    theirs = logits(other, prompt(2, 9))
    assert off(logits(model, prompt(2, 9)), theirs) < RELATIVE["int8"]
    assert model.lm_head.weight.numel() == 0
    if keep_original:
        patch.undo()
        assert same(state_of(model), state)
    else:
        assert not patch.is_exact


def test_weights_that_are_not_loaded_stay_bit_for_bit():
    """To round once more what was rounded could change it."""
    model = tiny_llama()
    fasttps.patch(model, "int4")
    before = {name: value.clone() for name, value in model.named_buffers() if "packed" in name}
    key = layer_weight("self_attn.k_proj")
    model.load_state_dict({key: torch.ones(24, 48)}, strict=False)
    now = dict(model.named_buffers())
    changed = {name for name in before if not torch.equal(before[name], now[name])}
    assert changed == {"model.layers.1.self_attn.k_proj.weight_packed"}


def test_a_source_has_no_weights_that_came_later(folder):
    path, model = folder
    patch = fasttps.patch(model, "int8", source=path)
    key = layer_weight("self_attn.k_proj")
    model.load_state_dict({key: torch.ones(24, 48)}, strict=False)
    assert not patch.is_exact
    with pytest.raises(fasttps.PatchError, match=r"layers\.1\.self_attn\.k_proj are quantised"):
        patch.undo()


def test_another_dtype_leaves_quantised_weights_alone():
    model = tiny_llama()
    before = state_of(model)
    patch = fasttps.patch(model, "int4", keep_original=True)
    packed = {name: bits(value) for name, value in model.named_buffers() if "packed" in name}
    model.to(torch.bfloat16)
    now = dict(model.named_buffers())
    assert all(torch.equal(packed[name], now[name]) for name in packed)
    assert logits(model, prompt(1, 3)).dtype == torch.bfloat16
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    patch.undo()
    rounded = {key: value.to(torch.bfloat16) for key, value in before.items()}
    assert same(state_of(model), rounded)


def test_a_copy_of_a_quantised_model():
    model = tiny_llama(tie_word_embeddings=True)
    fasttps.patch(model, "int4")
    other = copy.deepcopy(model)
    assert torch.equal(logits(other, prompt(1, 9)), logits(model, prompt(1, 9)))


# --- what was asked for works or raises ---


def unchanged_after(model, error, message, *arguments, **options):
    before = state_of(model)
    with pytest.raises(error, match=message):
        fasttps.patch(model, *arguments, **options)
    assert not is_patched(model) and same(state_of(model), before)


def test_weights_that_cannot_be_had():
    model = tiny_llama()
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()
    unchanged_after(
        model,
        fasttps.PatchError,
        r"weights='int8' cannot be had for model\.layers\.1\.mlp: .*Tanh.*mlp=",
        "int8",
    )
    patch = fasttps.patch(model, "int8", mlp=False)
    skipped = {entry.name for entry in patch.report().skipped}
    assert {f"model.layers.{at}.mlp" for at in range(3)} <= skipped


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"weights": "int3"},
            ValueError,
            "weights wanted one of 'bf16', 'int8', 'int4', got 'int3'",
        ),
        ({"weights": 8}, TypeError, "weights wanted a str or None, got int"),
        ({"weights": "int4", "group_size": 16}, ValueError, "group_size wanted one of 32, 64, 128"),
        ({"weights": "int4", "group_size": True}, TypeError, "group_size wanted a int or None"),
        (
            {"weights": "int8", "group_size": 64},
            ValueError,
            "group_size wanted one of 0, 32, got 64",
        ),
        ({"weights": "bf16", "group_size": 32}, ValueError, "group_size wanted None.*'bf16'"),
        ({"group_size": 32}, ValueError, "group_size wanted None"),
        ({"int8_activation": True}, ValueError, "int8_activation wanted None or False"),
        ({"weights": "bf16", "int8_activation": True}, ValueError, "int8_activation wanted None"),
        ({"kv": "int4"}, ValueError, "kv wanted one of 'bf16', 'int8', got 'int4'"),
        ({"kv": "int8", "attention": False}, ValueError, "kv wanted None without the attention"),
        ({"lm_head": "q6_k"}, ValueError, "lm_head wanted one of"),
        ({"keep_original": 1}, TypeError, "keep_original wanted a bool"),
    ],
    ids=str,
)
def test_arguments_that_are_wrong(options, error, message):
    unchanged_after(tiny_llama(num_hidden_layers=1), error, f"^patch: {message}", **options)


def test_generate_with_everything_quantised():
    model = tiny_llama(dtype=torch.bfloat16, tie_word_embeddings=True)
    patch = fasttps.patch(model, "int4", kv="int8", group_size=64)
    ids = generate(model, prompt(2, 9), cache=patch.cache(21))
    assert ids.shape == (2, 21)
    assert torch.equal(ids, generate(model, prompt(2, 9), cache=patch.cache(21)))
