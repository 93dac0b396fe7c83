"""A release of transformers that is not known, and one in which a signature has changed."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import transformers
from transformers.cache_utils import CacheLayerMixin
from transformers.models.llama import modeling_llama

import fasttps
from fasttps.models import transformers_adapter
from fasttps.models.patch import FusedModule, PatchError
from tests.support.families import FAMILIES
from tests.support.llama import generate, prompt


@pytest.fixture
def model():
    return FAMILIES["llama2"].model()


def set_version(monkeypatch, version):
    # The module of that name is put in place anew as parts of it are imported.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)


@pytest.fixture
def unknown_release(model, monkeypatch):
    set_version(monkeypatch, "5.99.1")
    monkeypatch.setattr(transformers_adapter, "_told", set())


def test_tested_releases_have_no_warning(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fasttps.patch(model).undo()


def test_unknown_release_warns_once_and_works(model, unknown_release):
    wanted = generate(model, prompt(1, 9))
    with pytest.warns(
        UserWarning, match=r"not tested with transformers 5\.99\.1, but with .*5\.24"
    ):
        patch = fasttps.patch(model)
    assert torch.equal(generate(model, prompt(1, 9), cache=patch.cache(30)), wanted)
    patch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fasttps.patch(model).undo()


def test_other_models_have_no_warning(unknown_release):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert transformers_adapter.check_release(torch.nn.Linear(2, 2)) is None


def renamed_mask(self, hidden_states, position_embeddings=None, mask=None, cache=None, **kwargs):
    raise AssertionError


def no_cache(self, hidden_states, position_embeddings=None, attention_mask=None, state=None):
    raise AssertionError


def no_logits_to_keep(
    self, input_ids, attention_mask, position_ids, inputs_embeds, use_cache, cache
):
    raise AssertionError


def two_inputs(self, x, residual):
    raise AssertionError


def renamed_keys(self, k, v):
    raise AssertionError


CHANGED = {
    "attention's mask": (
        *(modeling_llama.LlamaAttention, "forward", renamed_mask),
        "LlamaAttention.forward wanted parameters hidden_states, position_embeddings, "
        "attention_mask, got self, hidden_states, position_embeddings, mask, cache, kwargs",
    ),
    "attention's cache": (
        *(modeling_llama.LlamaAttention, "forward", no_cache),
        "LlamaAttention.forward wanted parameters cache, got",
    ),
    "layer's mask": (
        *(modeling_llama.LlamaDecoderLayer, "forward", renamed_mask),
        "LlamaDecoderLayer.forward wanted parameters hidden_states, attention_mask, got",
    ),
    "model's logits_to_keep": (
        *(modeling_llama.LlamaForCausalLM, "forward", no_logits_to_keep),
        "LlamaForCausalLM.forward wanted parameters input_ids",
    ),
    "MLP's inputs": (
        *(modeling_llama.LlamaMLP, "forward", two_inputs),
        "LlamaMLP.forward wanted parameters self, x, got self, x, residual",
    ),
    "cache's update": (
        *(CacheLayerMixin, "update", renamed_keys),
        "CacheLayerMixin.update wanted parameters key_states, value_states, got self, k, v",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("version", ["5.99.1", None])
def test_changed_signature_is_refused_with_the_reason(model, monkeypatch, name, version):
    kind, method, changed, reason = CHANGED[name]
    monkeypatch.setattr(kind, method, changed)
    if version is not None:
        set_version(monkeypatch, version)
    with pytest.raises(PatchError) as caught:
        fasttps.patch(model)
    shown = version or transformers.__version__
    assert str(caught.value).startswith(
        f"patch: transformers {shown} is not as fasttps expects: {reason}"
    )
    assert not any(isinstance(module, FusedModule) for module in model.modules())


def test_module_of_another_layout_is_left_alone_with_the_reason(model):
    """What a module lacks is that module's own affair: the others are patched."""
    mlp = model.model.layers[1].mlp
    mlp.up = mlp.up_proj
    del mlp.up_proj
    (entry,) = [e for e in fasttps.patch(model).report().skipped if e.name.endswith("1.mlp")]
    assert "up_proj" in str(entry.reason)
