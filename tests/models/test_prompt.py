"""A prompt of which the last logits are wanted: the last layer runs for its end alone."""

from __future__ import annotations

import pytest
import torch

import fasttps
from fasttps.models.llama import FusedLlamaAttention
from tests.support.llama import LAYERS, prompt, tiny_llama


@pytest.fixture
def ends(monkeypatch):
    """How many tokens the last layer was run for, call by call."""
    counts = []
    real = FusedLlamaAttention.forward_last

    def counting(self, rows, rope, cache, count):
        counts.append(count)
        return real(self, rows, rope, cache, count)

    monkeypatch.setattr(FusedLlamaAttention, "forward_last", counting)
    return counts


def run(model, ids, cache, **more):
    name = model.cache_name()
    with torch.inference_mode():
        return model(ids, **{name: cache}, **more).logits


@pytest.mark.parametrize("kv", [None, "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 16])
def test_logits_and_cache_are_those_of_the_whole_prompt(ends, kv, dtype, count):
    model = tiny_llama().to(dtype)
    patch = fasttps.patch(model, kv=kv)
    ids = prompt(2, 29)
    whole, ours = patch.cache(64), patch.cache(64)
    wanted = run(model, ids, whole)[:, -count:]
    assert ends == []
    got = run(model, ids, ours, logits_to_keep=count)
    assert ends == [count]
    assert got.dtype == wanted.dtype
    # Attention of few and of many tokens round bf16 at different places.
    tolerance = 0.04 if torch.bfloat16 in (dtype, ours.layers[0].dtype) else 1e-5
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert ours.get_seq_length() == whole.get_seq_length() == 29
    for layer in range(LAYERS):
        for name in ("keys", "values", "k_scale", "v_scale"):
            a, b = getattr(ours.layers[layer], name), getattr(whole.layers[layer], name)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a[:, :, :29], b[:, :, :29]), (layer, name)
    step = ids[:, :1]
    torch.testing.assert_close(
        run(model, step, ours), run(model, step, whole), rtol=tolerance, atol=tolerance
    )


def test_a_prompt_in_parts(ends):
    model = tiny_llama()
    patch = fasttps.patch(model)
    ids = prompt(1, 40)
    wanted = run(model, ids, patch.cache(64))[:, -1:]
    cache = patch.cache(64)
    run(model, ids[:, :17], cache, logits_to_keep=1)
    got = run(model, ids[:, 17:], cache, logits_to_keep=1)
    assert ends == [1, 1]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_generate_runs_prompts_so(ends):
    model = tiny_llama()
    ids = prompt(1, 20)
    with torch.inference_mode():
        wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    patch = fasttps.patch(model)
    with torch.inference_mode():
        name = {model.cache_name(): patch.cache(64)}
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, **name), wanted)
    made = fasttps.generate(model, ids, max_new_tokens=8)
    assert made.token_ids[0] == wanted[0, 20:].tolist()
    assert ends == [1, 1]


def padded(ids):
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.parametrize(
    "more",
    [
        padded,
        lambda ids: {"output_hidden_states": True},
        lambda ids: {"logits_to_keep": torch.tensor([28])},
        lambda ids: {"logits_to_keep": 29},
        lambda ids: {"logits_to_keep": 0},
    ],
    ids=["padded", "hidden states", "a tensor", "all", "0 for all"],
)
def test_what_wants_all_tokens_gets_them(ends, more):
    model = tiny_llama()
    ids = prompt(1, 29)
    options = {"logits_to_keep": 1, **more(ids)}
    with torch.inference_mode():
        wanted = model(ids, **options).logits
    patch = fasttps.patch(model)
    got = run(model, ids, patch.cache(64), **options)
    assert ends == []
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_hook_sees_all_tokens(ends):
    model = tiny_llama()
    patch = fasttps.patch(model)
    seen = []
    layer = model.model.layers[-1]
    layer.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    run(model, prompt(1, 29), patch.cache(64), logits_to_keep=1)
    assert (seen, ends) == ([29], [])


def test_a_prompt_longer_than_the_cache_leaves_it_as_it_was():
    model = tiny_llama()
    patch = fasttps.patch(model)
    cache = patch.cache(16)
    with pytest.raises(ValueError, match="max_seq_len wanted at least 29"):
        run(model, prompt(1, 29), cache, logits_to_keep=1)
    assert cache.get_seq_length() == 0
    ids = prompt(1, 12)
    wanted = run(model, ids, patch.cache(16))[:, -1:]
    torch.testing.assert_close(
        run(model, ids, cache, logits_to_keep=1), wanted, rtol=1e-5, atol=1e-5
    )
