"""What is changed in a patched model between two tokens counts for the next one."""

from __future__ import annotations

from functools import wraps

import pytest
import torch
from torch import nn

import fasttps
from tests.support.llama import logits, prompt, tiny_llama


def scaled(module, factor):
    """Another forward on the instance, as libraries that wrap a module leave it."""
    inner = module.forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs) * factor


def scaled_angles(rotary):
    inner = rotary.forward
    rotary.forward = lambda *args, **kwargs: [x * 1.2 for x in inner(*args, **kwargs)]


def new_bias(linear, value):
    linear.bias = None if value is None else nn.Parameter(torch.full_like(linear.bias, value))


CHANGES = {
    "a bias": lambda m: new_bias(m.model.layers[1].self_attn.q_proj, 0.7),
    "a bias taken away": lambda m: new_bias(m.model.layers[1].self_attn.q_proj, None),
    "a bias of an MLP": lambda m: new_bias(m.model.layers[0].mlp.gate_proj, 0.7),
    "the last epsilon": lambda m: setattr(m.model.norm, "variance_epsilon", 0.5),
    "an epsilon": lambda m: setattr(m.model.layers[1].input_layernorm, "variance_epsilon", 0.5),
    "a scaling": lambda m: setattr(m.model.layers[1].self_attn, "scaling", 1.0),
    "fewer layers": lambda m: setattr(m.config, "num_hidden_layers", 2),
    "a layer's forward": lambda m: scaled(m.model.layers[1], 1.5),
    "a linear's forward": lambda m: scaled(m.model.layers[1].self_attn.q_proj, 1.5),
    "an MLP's forward": lambda m: scaled(m.model.layers[1].mlp, 1.5),
    "a norm's forward": lambda m: scaled(m.model.norm, 1.5),
    "an embedding's forward": lambda m: scaled(m.model.embed_tokens, 1.5),
    "RoPE's forward": lambda m: scaled_angles(m.model.rotary_emb),
    "RoPE's frequencies": lambda m: m.model.rotary_emb.inv_freq.set_(torch.ones(6)),
    "RoPE's frequencies' data": lambda m: setattr(
        m.model.rotary_emb.inv_freq, "data", torch.ones(6)
    ),
    "RoPE's scaling": lambda m: setattr(m.model.rotary_emb, "attention_scaling", 1.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_same_logits_as_unpatched(change):
    ids, outs = prompt(2, 14), []
    for patched in (True, False):
        model = tiny_llama(attention_bias=True, mlp_bias=True)
        if patched:
            fasttps.patch(model)
        cache = fasttps.StaticKVCache(model.config, 16)
        outs.append([logits(model, ids[:, :9], cache=cache)[:, -1:]])
        for at in range(9, 14):
            if at == 11:
                CHANGES[change](model)
            outs[-1].append(logits(model, ids[:, at : at + 1], cache=cache))
    torch.testing.assert_close(torch.cat(outs[0], 1), torch.cat(outs[1], 1), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "linear",
    [lambda m: m.model.layers[1].self_attn.q_proj, lambda m: m.model.layers[1].mlp.up_proj],
    ids=["attention", "MLP"],
)
def test_a_weight_that_came_after_the_patch_is_refused(linear):
    ids, model = prompt(2, 10), tiny_llama()
    fasttps.patch(model)
    cache = fasttps.StaticKVCache(model.config, 16)
    logits(model, ids[:, :9], cache=cache)
    part = linear(model)
    part.weight = nn.Parameter(torch.zeros(part.out_features, part.in_features))
    with pytest.raises(RuntimeError, match="came after the patch"):
        logits(model, ids[:, 9:], cache=cache)


def test_generate_runs_what_is_hooked_on_the_model_itself():
    model, calls, ids = tiny_llama(), [], prompt(2, 9)
    fasttps.patch(model)
    expected = fasttps.generate(model, ids, max_new_tokens=4, stop_token_ids=()).token_ids
    inner = model.forward

    @wraps(inner)
    def forward(*args, **kwargs):
        calls.append("forward")
        return inner(*args, **kwargs)

    handle = model.register_forward_hook(lambda *_: calls.append("hook"))
    assert fasttps.generate(model, ids, max_new_tokens=4, stop_token_ids=()).token_ids == expected
    assert calls == ["hook"] * 4
    handle.remove()
    calls.clear()
    model.forward = forward
    assert fasttps.generate(model, ids, max_new_tokens=4, stop_token_ids=()).token_ids == expected
    assert calls == ["forward"] * 4


def test_generate_goes_on_where_a_callback_undoes_the_patch():
    model, ids = tiny_llama(), prompt(2, 9)
    patch = fasttps.patch(model)
    expected = fasttps.generate(model, ids, max_new_tokens=8, stop_token_ids=())
    made = fasttps.generate(
        model, ids, max_new_tokens=8, stop_token_ids=(), on_tokens=lambda _: patch.undo()
    )
    assert made.token_ids == expected.token_ids
