"""Weights that change under a patch: packed again, left as they are, or refused; never ignored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fasttps
from tests.support.errors import bits
from tests.support.llama import logits, prompt, tiny_llama


def mlp_of(model, layer=1):
    return model.model.layers[layer].mlp


def test_to_a_dtype_that_is_not_packed_converts_the_whole_model():
    """It stopped at the first MLP, with half of the model in the new dtype."""
    model = tiny_llama()
    with fasttps.patch(model):
        ours = logits(model, prompt(1, 9))
        model.double()
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert "not packed: gate_proj weight: are torch.float64" in repr(mlp_of(model))
        with pytest.raises(TypeError, match="query"):  # the attention has no other way
            logits(model, prompt(1, 3))
        model.float()
        assert "packed F32, silu" in repr(mlp_of(model))
        assert mlp_of(model).gate_proj.weight.numel() == 0
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.float()
        assert torch.equal(logits(model, prompt(1, 9)), ours)


def test_undo_after_a_dtype_that_is_not_packed():
    model, other = tiny_llama(), tiny_llama().double()
    patch = fasttps.patch(model)
    model.double()
    patch.undo()
    assert torch.equal(logits(model, prompt(2, 9)), logits(other, prompt(2, 9)))


def test_to_the_meta_device_and_back():
    model, other = tiny_llama(), tiny_llama()
    with fasttps.patch(model):
        ours, buffers = logits(model, prompt(1, 9)), dict(model.named_buffers())
        model.to("meta")
        assert all(p.is_meta for p in model.parameters())
        model.load_state_dict(other.state_dict(), assign=True)
        model.model.rotary_emb.inv_freq = buffers["model.rotary_emb.inv_freq"]
        assert mlp_of(model).gate_proj.weight.numel() == 0
        assert torch.equal(logits(model, prompt(1, 9)), ours)


def test_an_mlp_alone_in_float64_computes_in_float64():
    model, x = tiny_llama(), torch.randn(2, 48, generator=torch.Generator().manual_seed(0))
    with fasttps.patch(model), torch.no_grad():
        theirs = mlp_of(tiny_llama()).double()(x.double())
        assert torch.equal(mlp_of(model).double()(x.double()), theirs)


@pytest.mark.parametrize("names", [("up_proj",), ("gate_proj", "up_proj", "down_proj")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_dtype_are_assigned(names, dtype):
    """They could not be packed, and then neither be given back: the old ones were lost."""
    model = tiny_llama()
    theirs = {key: value.clone() for key, value in model.state_dict().items()}
    state = dict(theirs)
    for name in names:
        key = f"model.layers.1.mlp.{name}.weight"
        state[key] = state[key].to(dtype)
    patch = fasttps.patch(model)
    model.load_state_dict(state, assign=True)
    with pytest.raises((RuntimeError, TypeError), match=r"(?i)dtype|bfloat16"):
        logits(model, prompt(1, 3))
    assert all(
        torch.equal(bits(value), bits(state[key])) for key, value in model.state_dict().items()
    )
    model.load_state_dict(theirs, assign=True)
    assert "packed F32" in repr(mlp_of(model))
    model.load_state_dict(state, assign=True)
    patch.undo()
    assert not any(isinstance(m, fasttps.models.patch.FusedModule) for m in model.modules())
    assert all(
        torch.equal(bits(value), bits(state[key])) for key, value in model.state_dict().items()
    )


def test_weights_of_a_functional_call_are_not_ignored():
    model = tiny_llama()
    weights = {"model.layers.1.mlp.gate_proj.weight": torch.zeros(88, 48)}
    with fasttps.patch(model):
        with torch.no_grad(), pytest.raises(RuntimeError, match="FusedLlamaMLP: gate_proj has"):
            torch.func.functional_call(model, weights, (prompt(1, 3),))
        logits(model, prompt(1, 3))


def test_a_weight_that_is_assigned_is_not_ignored():
    model, weight = tiny_llama(), nn.Parameter(torch.ones(48, 88))
    other = tiny_llama()
    mlp_of(other).down_proj.weight = weight
    theirs = logits(other, prompt(1, 3))
    with fasttps.patch(model):
        mlp_of(model).down_proj.weight = weight
        with pytest.raises(RuntimeError, match="FusedLlamaMLP: down_proj has a weight"):
            logits(model, prompt(1, 3))
        assert torch.equal(model.state_dict()["model.layers.1.mlp.down_proj.weight"], weight)
    assert mlp_of(model).down_proj.weight is weight
    assert torch.equal(logits(model, prompt(1, 3)), theirs)


@pytest.mark.parametrize("name", ["gate_proj", "down_proj", "act_fn"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_on_a_projection_that_comes_after_the_patch(name, kind):
    model = tiny_llama()
    with fasttps.patch(model):
        ours = logits(model, prompt(1, 3))
        hook = getattr(mlp_of(model).get_submodule(name), kind)(lambda *args: None)
        with pytest.raises(RuntimeError, match=f"FusedLlamaMLP: {name} has .*hooks"):
            logits(model, prompt(1, 3))
        hook.remove()
        assert torch.equal(logits(model, prompt(1, 3)), ours)


@pytest.mark.parametrize("static", [True, False])
def test_embeddings_that_are_a_transposed_view(static):
    """The op takes a dense last dimension only, unlike nn.Linear."""
    model = tiny_llama()
    embeddings = torch.randn(2, 48, 9, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    theirs = logits(model, None, inputs_embeds=embeddings)
    with fasttps.patch(model):
        cache = fasttps.StaticKVCache(model.config, 9) if static else None
        ours = logits(model, None, inputs_embeds=embeddings, cache=cache)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


def test_the_mlp_compiles_into_one_graph():
    """What is looked at before each call must not break it."""
    model, x = tiny_llama(), torch.randn(2, 48, generator=torch.Generator().manual_seed(0))
    with fasttps.patch(model), torch.no_grad():
        compiled = torch.compile(mlp_of(model), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), mlp_of(model)(x))
        torch._dynamo.reset()
