"""What a patch leaves alone, and what `undo` gives back: everything, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import fasttps
from fasttps.models.patch import FusedModule
from tests.support.errors import bits
from tests.support.llama import FUSED_MODULES, generate, logits, prompt, tiny_llama

FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def snapshot(model):
    """All that a patch may touch: classes, attributes, the Parameters themselves and their bits."""
    return {
        name: (
            type(module),
            {key: id(value) for key, value in module.__dict__.items() if key[0] != "_"},
            {key: id(value) for key, value in module._parameters.items()},
            {key: id(value) for key, value in module._buffers.items()},
            sorted(module._non_persistent_buffers_set),
            list(module._load_state_dict_post_hooks),
            [
                (p.dtype, p.shape, p.stride(), p.requires_grad, bits(p).tolist())
                for p in module._parameters.values()
                if p is not None
            ],
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("dtype", FORMATS)
def test_undo_restores_bit_for_bit(dtype):
    model = tiny_llama(mlp_bias=True, dtype=dtype)
    weight = model.model.layers[0].mlp.gate_proj.weight.data
    weight.view(-1)[:3] = torch.tensor([torch.nan, -0.0, torch.inf])
    before, config = snapshot(model), copy.deepcopy(model.config.to_dict())
    patch = fasttps.patch(model)
    logits(model, prompt(1, 3))
    assert any(isinstance(module, FusedModule) for module in model.modules())
    patch.undo()
    assert snapshot(model) == before
    assert model.config.to_dict() == config


def test_undo_restores_the_outputs():
    model = tiny_llama()
    theirs, tokens = logits(model, prompt(2, 9)), generate(model, prompt(2, 9))
    fasttps.patch(model).undo()
    assert torch.equal(logits(model, prompt(2, 9)), theirs)
    assert torch.equal(generate(model, prompt(2, 9)), tokens)


def test_a_second_undo_does_nothing():
    model = tiny_llama()
    patch = fasttps.patch(model)
    patch.undo()
    with fasttps.patch(model):
        patch.undo()
        assert isinstance(model.model.layers[0].mlp, FusedModule)


def test_context_manager_undoes_after_an_error():
    model = tiny_llama()
    before = snapshot(model)
    with pytest.raises(KeyError), fasttps.patch(model) as patch:
        assert len(patch.report().fused) == FUSED_MODULES
        raise KeyError
    assert snapshot(model) == before


def test_a_failure_midway_takes_everything_back(monkeypatch):
    """All or nothing: also where memory runs out in the last layer."""
    from fasttps.models import packed_module

    model = tiny_llama()
    before = snapshot(model)
    pack, calls = packed_module.ops.pack_weight, []

    def out_of_memory(*args, **kwargs):
        calls.append(args)
        if len(calls) == 10:
            raise MemoryError
        return pack(*args, **kwargs)

    monkeypatch.setattr(packed_module.ops, "pack_weight", out_of_memory)
    with pytest.raises(MemoryError):
        fasttps.patch(model)
    assert len(calls) == 10
    assert snapshot(model) == before


def test_progress_names_every_module():
    model, seen = tiny_llama(), []
    with fasttps.patch(model, progress=lambda *step: seen.append(step)) as patch:
        names = [entry.name for entry in patch.report().fused]
    assert seen == [(at + 1, FUSED_MODULES, name) for at, name in enumerate(names)]


def test_an_error_in_progress_takes_everything_back():
    """Ctrl-C while the weights are packed."""
    model = tiny_llama()
    before = snapshot(model)

    def interrupted(done, total, name):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fasttps.patch(model, progress=interrupted)
    assert snapshot(model) == before


def test_two_models_in_one_process_one_patched():
    """They share one config object, which must not change."""
    from transformers import LlamaForCausalLM

    one, other = tiny_llama(0), tiny_llama(1)
    other.config = one.config
    for module in other.modules():
        if "config" in module.__dict__:
            module.config = one.config
    config, untouched = one.config, snapshot(other)
    theirs = logits(other, prompt(2, 9))
    with fasttps.patch(one):
        assert snapshot(other) == untouched
        assert other.config is config
        assert config._attn_implementation == "sdpa"
        assert one.config._attn_implementation == "fasttps"
        assert torch.equal(logits(other, prompt(2, 9)), theirs)
        third = LlamaForCausalLM(config)  # a model made while another is patched
        assert not any(isinstance(module, FusedModule) for module in third.modules())
        assert third.config._attn_implementation == "sdpa"
    assert one.config is config


def test_edits_of_the_config_outlive_the_patch():
    """They were made on a copy that undo dropped: the vocabulary shrank back."""
    model = tiny_llama()
    config = model.config
    with fasttps.patch(model, lm_head=False):
        model.resize_token_embeddings(101)
        model.config.use_cache = False
        model.config.of_the_user = 1
    assert model.config is config and model.model.config is config
    assert (config.vocab_size, config.use_cache, config.of_the_user) == (101, False, 1)
    assert config._attn_implementation == "sdpa"


def test_no_global_of_transformers_changes():
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    attributes = {name: dict(vars(kind)) for name, kind in before.items() if isinstance(kind, type)}
    with fasttps.patch(tiny_llama()):
        assert vars(modeling_llama) == before
        for name, members in attributes.items():
            assert dict(vars(before[name])) == members


def test_undo_of_one_model_leaves_another_patch_alone():
    one, other = tiny_llama(0), tiny_llama(1)
    first, second = fasttps.patch(one), fasttps.patch(other)
    ours = logits(other, prompt(2, 9))
    first.undo()
    assert torch.equal(logits(other, prompt(2, 9)), ours)
    second.undo()


def test_save_pretrained_writes_the_original_keys(tmp_path):
    """Patched and unpatched write the same file, and it reloads bit for bit."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = tiny_llama(tie_word_embeddings=True, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    with fasttps.patch(model):
        model.save_pretrained(tmp_path / "patched")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    patched = load_file(tmp_path / "patched" / "model.safetensors")
    assert plain.keys() == patched.keys()
    assert all(torch.equal(bits(plain[key]), bits(patched[key])) for key in plain)
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "plain" / file).read_text() == (tmp_path / "patched" / file).read_text()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched").eval()
    assert torch.equal(logits(reloaded, prompt(1, 9)), logits(model, prompt(1, 9)))
    assert reloaded.config._attn_implementation == "sdpa"


def test_state_dict_is_the_original():
    model = tiny_llama(mlp_bias=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with fasttps.patch(model):
        during = model.state_dict()
        assert list(during) == list(before)
        assert all(torch.equal(during[key], before[key]) for key in before)
        part = model.model.layers[1].mlp.state_dict(prefix="mlp.")
        assert torch.equal(part["mlp.up_proj.weight"], before["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_repacks(assign):
    other = tiny_llama(1)
    state = {key: value.clone() for key, value in other.state_dict().items()}
    model = tiny_llama(0)
    with fasttps.patch(model):
        model.load_state_dict(state, assign=assign)
        torch.testing.assert_close(
            logits(model, prompt(2, 9)), logits(other, prompt(2, 9)), rtol=0, atol=2e-4
        )
        assert model.model.layers[0].mlp.gate_proj.weight.numel() == 0
        incomplete = {key: value for key, value in state.items() if "up_proj" not in key}
        with pytest.raises(RuntimeError, match=r"Missing key.*up_proj"):
            model.load_state_dict(incomplete)
        torch.testing.assert_close(
            logits(model, prompt(2, 9)), logits(other, prompt(2, 9)), rtol=0, atol=2e-4
        )
    assert torch.equal(logits(model, prompt(2, 9)), logits(other, prompt(2, 9)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_to_another_dtype_repacks(dtype):
    model, other = tiny_llama(), tiny_llama().to(dtype)
    patch = fasttps.patch(model)
    model.to(dtype)
    assert logits(model, prompt(2, 9)).dtype == dtype
    torch.testing.assert_close(
        logits(model, prompt(2, 9)).float(), logits(other, prompt(2, 9)).float(), rtol=0, atol=0.5
    )
    patch.undo()
    assert torch.equal(logits(model, prompt(2, 9)), logits(other, prompt(2, 9)))


def test_to_what_it_is_already_packs_nothing_again(monkeypatch):
    from fasttps.models import packed_module

    model = tiny_llama(tie_word_embeddings=True)
    with fasttps.patch(model):
        ours = logits(model, prompt(1, 9))
        monkeypatch.setattr(packed_module, "_pack", None)  # to call it would raise
        model.to(torch.float32).to("cpu").float()
        assert torch.equal(logits(model, prompt(1, 9)), ours)
        monkeypatch.undo()


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model = tiny_llama()
        theirs = logits(model, prompt(2, 9))
    patch = fasttps.patch(model)
    with torch.inference_mode():
        torch.testing.assert_close(logits(model, prompt(2, 9)), theirs, rtol=0, atol=2e-4)
    patch.undo()
    with torch.inference_mode():
        assert torch.equal(logits(model, prompt(2, 9)), theirs)


def test_gate_and_up_as_halves_of_one_tensor():
    """Views of a fused weight: shared storage, not shared weights."""
    model = tiny_llama()
    theirs = logits(model, prompt(2, 9))
    for layer in model.model.layers:
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        gate.data, up.data = torch.cat([gate.data, up.data]).split(gate.size(0))
    with fasttps.patch(model) as patch:
        assert len(patch.report().fused) == FUSED_MODULES
        torch.testing.assert_close(logits(model, prompt(2, 9)), theirs, rtol=0, atol=2e-4)
    assert torch.equal(logits(model, prompt(2, 9)), theirs)


def test_patched_models_are_freed():
    """A registry that kept what it knew kept every model elsewhere."""
    references = []
    for seed in range(5):
        model = tiny_llama(seed, num_hidden_layers=1)
        cache = fasttps.StaticKVCache(model.config, 16)
        patch = fasttps.patch(model)
        generate(model, prompt(1, 3), cache=cache)
        references += [weakref.ref(kept) for kept in (model, model.model.layers[0].mlp, cache)]
        if seed % 2:
            patch.undo()
        del model, cache, patch
    gc.collect()
    assert [reference() for reference in references] == [None] * 15
