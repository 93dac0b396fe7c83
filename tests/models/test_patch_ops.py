"""That a patched model runs our ops, all of them, and that what it computes is what it should."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fasttps
from tests.support.llama import FUSED_MODULES, LAYERS, generate, logits, prompt, tiny_llama

OURS = (
    "rope_attention_decode",
    "causal_prefill",
    "gate_up_silu_mlp",
    "kv_cache_update_",
    "packed_linear",
    "decode_step",
)


def op_counts(call):
    """How often each of our ops, and aten::linear, ran in `call`."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    counts = {event.key: event.count for event in profiled.key_averages()}
    wanted = {f"fasttps::{op}": op for op in OURS} | {"aten::linear": "linear"}
    return {short: counts[key] for key, short in wanted.items() if key in counts}


def cosine(ours, theirs):
    return torch.nn.functional.cosine_similarity(
        ours.float().flatten(), theirs.float().flatten(), dim=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", ["static_kv_cache", "dynamic"])
def test_every_layer_runs_our_ops(dtype, cache):
    """A kernel that is no longer reached changes the speed alone, so numbers do not show it."""
    model = tiny_llama(dtype=dtype)
    linears = 4 * LAYERS + 1  # q, k, v, o and the head; none is aten's
    with fasttps.patch(model):
        held = fasttps.StaticKVCache(model.config, 32) if cache != "dynamic" else None
        if held is None:
            from transformers import DynamicCache

            held = DynamicCache(config=model.config)
        prefill = op_counts(lambda: logits(model, prompt(1, 16), cache=held))
        decode = op_counts(lambda: logits(model, prompt(1, 1), cache=held))
        drafts = op_counts(lambda: logits(model, prompt(1, 8), cache=held))
    common = {"gate_up_silu_mlp": LAYERS, "packed_linear": linears}
    assert prefill == {"causal_prefill": LAYERS, **common}
    if cache == "static_kv_cache":
        assert decode == {"decode_step": 1}
    else:
        assert decode == {"rope_attention_decode": LAYERS, **common}
    assert drafts == decode


def test_after_undo_none_of_our_ops_runs():
    model = tiny_llama()
    fasttps.patch(model).undo()
    assert op_counts(lambda: logits(model, prompt(1, 16))) == {"linear": 7 * LAYERS + 1}


def test_an_unpatched_model_writes_a_static_kv_cache_with_our_op():
    model = tiny_llama()
    cache = fasttps.StaticKVCache(model.config, 16)
    counts = op_counts(lambda: logits(model, prompt(1, 16), cache=cache))
    assert counts == {"kv_cache_update_": LAYERS, "linear": 7 * LAYERS + 1}


def test_a_batch_without_batch_dimension_of_the_mlp():
    model = tiny_llama()
    mlp, x = model.model.layers[0].mlp, torch.randn(5, 48)
    with torch.no_grad():
        theirs = mlp(x)
        with fasttps.patch(model):
            torch.testing.assert_close(mlp(x), theirs, rtol=0, atol=1e-5)
            assert mlp(x[0]).shape == (48,)
            assert mlp(x[:0]).shape == (0, 48)


@pytest.mark.parametrize(
    ("hidden_act", "at_one"),
    [
        ("silu", 1 / (1 + math.exp(-1))),
        ("swish", 1 / (1 + math.exp(-1))),
        ("gelu", 0.5 * (1 + math.erf(1 / math.sqrt(2)))),
        ("gelu_python", 0.5 * (1 + math.erf(1 / math.sqrt(2)))),
        ("gelu_pytorch_tanh", 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))),
    ],
)
def test_hidden_act(hidden_act, at_one):
    """gate(1) = 1, up = 1, down = 1: the MLP of 1 is the activation of 1."""
    model = tiny_llama(hidden_size=4, intermediate_size=1, hidden_act=hidden_act)
    mlp = model.model.layers[0].mlp
    for linear, weight in ((mlp.gate_proj, [1.0, 0, 0, 0]), (mlp.up_proj, [1.0, 0, 0, 0])):
        linear.weight.data = torch.tensor([weight])
    mlp.down_proj.weight.data = torch.tensor([[1.0], [0], [0], [0]])
    with fasttps.patch(model) as patch, torch.no_grad():
        assert len(patch.report().fused) == FUSED_MODULES
        out = mlp(torch.tensor([[1.0, 0, 0, 0]]))
    torch.testing.assert_close(out, torch.tensor([[at_one, 0, 0, 0]]), rtol=1e-6, atol=0)


def test_mlp_bias():
    model = tiny_llama(mlp_bias=True)
    mlp, zeros = model.model.layers[0].mlp, torch.zeros(1, 48)
    with torch.no_grad():
        theirs = mlp(zeros)
        assert theirs.abs().max() > 0.5
        with fasttps.patch(model):
            torch.testing.assert_close(mlp(zeros), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", [(256, 257), (4096, 4097), (15962, 15963)])
@pytest.mark.parametrize("cache", [True, False])
def test_positions_under_autocast(positions, cache):
    """Angles built in bfloat16 make 257 equal to 256 and 4097 to 4096."""
    exact = tiny_llama(max_position_embeddings=16384)
    model = tiny_llama(max_position_embeddings=16384, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), fasttps.patch(model):
        outs = []
        for last in positions:
            position_ids = torch.tensor([[0, 1, 2, last]])
            held = fasttps.StaticKVCache(model.config, 8) if cache else None
            outs.append(logits(model, prompt(1, 4), cache=held, position_ids=position_ids)[0, -1])
    assert not torch.equal(*outs)
    for last, out in zip(positions, outs):
        theirs = logits(exact, prompt(1, 4), position_ids=torch.tensor([[0, 1, 2, last]]))[0, -1]
        assert cosine(out, theirs) > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", [True, False])
def test_autocast(dtype, cache):
    """The dtypes that autocast mixes (keys are rotated to float32, values stay) are taken."""
    model = tiny_llama(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        theirs = logits(model, prompt(2, 9))
        mlp = model.model.layers[0].mlp(torch.ones(1, 48, dtype=dtype))
        with fasttps.patch(model):
            held = fasttps.StaticKVCache(model.config, 9) if cache else None
            ours = logits(model, prompt(2, 9), cache=held)
            assert ours.dtype == theirs.dtype
            assert model.model.layers[0].mlp(torch.ones(1, 48, dtype=dtype)).dtype == mlp.dtype
    assert cosine(ours, theirs) > 0.999


@pytest.mark.parametrize("cache", [True, False])
def test_output_attentions_and_hidden_states(cache):
    eager, model = tiny_llama(attn_implementation="eager"), tiny_llama()
    with torch.no_grad():
        theirs = eager(prompt(2, 9), output_attentions=True, output_hidden_states=True)
        with fasttps.patch(model):
            held = fasttps.StaticKVCache(model.config, 9) if cache else None
            ours = model(
                prompt(2, 9),
                past_key_values=held,
                output_attentions=True,
                output_hidden_states=True,
            )
    assert len(ours.attentions) == LAYERS and len(ours.hidden_states) == LAYERS + 1
    for mine, other in zip(
        (*ours.attentions, *ours.hidden_states), (*theirs.attentions, *theirs.hidden_states)
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-4)


def test_attentions_of_generate():
    eager, model = tiny_llama(attn_implementation="eager"), tiny_llama()
    options = {"output_attentions": True, "return_dict_in_generate": True}
    theirs = generate(eager, prompt(2, 9), **options)
    with fasttps.patch(model):
        cache = fasttps.StaticKVCache(model.config, 21)
        ours = generate(model, prompt(2, 9), cache=cache, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, other in zip(ours.attentions, theirs.attentions):
        for layer, wanted in zip(mine, other):
            torch.testing.assert_close(layer, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("when", ["before", "while"])
def test_attn_implementation_of_the_model(implementation, when):
    """Chosen before the patch it comes back after; chosen while patched it is obeyed."""
    model = tiny_llama()
    theirs = logits(model, prompt(2, 9))
    if when == "before":
        model.set_attn_implementation(implementation)
    with fasttps.patch(model):
        if when == "while":
            model.set_attn_implementation(implementation)
            for cache in (None, fasttps.StaticKVCache(model.config, 9)):
                counts = op_counts(lambda: logits(model, prompt(2, 9), cache=cache))  # noqa: B023
                assert "causal_prefill" not in counts and counts["gate_up_silu_mlp"] == LAYERS
        for cache in (None, fasttps.StaticKVCache(model.config, 9)):
            ours = logits(model, prompt(2, 9), cache=cache)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    assert model.config._attn_implementation == (implementation if when == "before" else "sdpa")


@pytest.mark.parametrize("cache", [True, False])
def test_a_prefix_mask_that_looks_ahead(cache):
    """A 4-D mask decides alone: here the first 4 tokens see each other."""
    plain, model = tiny_llama(), tiny_llama()
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[:4, :4] = True
    mask = mask[None, None].expand(2, 1, 9, 9)
    theirs = logits(plain, prompt(2, 9), attention_mask=mask)
    with fasttps.patch(model):
        held = fasttps.StaticKVCache(model.config, 9) if cache else None
        ours = logits(model, prompt(2, 9), attention_mask=mask, cache=held)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    assert not torch.allclose(theirs, logits(plain, prompt(2, 9)), atol=1e-2)


@pytest.mark.parametrize("cache", [True, False])
def test_not_causal_by_argument(cache):
    plain, model = tiny_llama(), tiny_llama()
    theirs = logits(plain, prompt(2, 9), is_causal=False)
    with fasttps.patch(model):
        held = fasttps.StaticKVCache(model.config, 9) if cache else None
        ours = logits(model, prompt(2, 9), is_causal=False, cache=held)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    assert not torch.allclose(theirs, logits(plain, prompt(2, 9)), atol=1e-2)


@pytest.mark.parametrize("cache", [True, False])
def test_arguments_that_the_one_op_does_not_serve(cache):
    """A caller may pass the attention more than a mask; none of it is dropped."""
    model = tiny_llama()
    with fasttps.patch(model):
        sinks = torch.tensor([1.0, -2.0, 3.0, 0.0])
        held = [fasttps.StaticKVCache(model.config, 9) if cache else None for _ in range(3)]
        plain = logits(model, prompt(1, 9), cache=held[0])
        with_sinks = logits(model, prompt(1, 9), cache=held[1], s_aux=sinks)
        capped = logits(model, prompt(1, 9), cache=held[2], softcap=0.5)
        with pytest.raises(ValueError, match="position_bias"):
            logits(model, prompt(1, 9), position_bias=torch.zeros(1, 4, 9, 9))
    assert not torch.allclose(with_sinks, plain, atol=1e-2)
    assert not torch.allclose(capped, plain, atol=1e-2)


def test_packed_sequences():
    """position_ids that start again keep sequences in one row apart."""
    plain, model = tiny_llama(), tiny_llama()
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    options = {"position_ids": position_ids, "use_cache": False}
    theirs = logits(plain, prompt(1, 9), **options)
    with fasttps.patch(model):
        ours = logits(model, prompt(1, 9), **options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


def test_hooks_still_fire():
    model, seen = tiny_llama(), []
    for name in ("mlp", "self_attn"):
        getattr(model.model.layers[1], name).register_forward_hook(
            lambda module, args, output: seen.append(type(module).__name__)
        )
    with fasttps.patch(model):
        logits(model, prompt(1, 3))
    logits(model, prompt(1, 3))
    assert seen == ["FusedLlamaAttention", "FusedLlamaMLP", "LlamaAttention", "LlamaMLP"]


def test_class_based_selection_still_works():
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    model = tiny_llama()
    with fasttps.patch(model):
        for kind in (LlamaAttention, LlamaMLP):
            assert sum(isinstance(module, kind) for module in model.modules()) == LAYERS
        assert isinstance(model.model.layers[0].mlp.gate_proj, nn.Linear)


@pytest.mark.parametrize("cache", [False, True])
def test_compiled(cache):
    """Under torch.compile the same numbers come out; the StaticKVCache breaks the graph."""
    model = tiny_llama()
    with fasttps.patch(model), torch.no_grad():
        theirs = [logits(model, prompt(1, 9)), logits(model, prompt(1, 10))[:, 9:]]
        held = fasttps.StaticKVCache(model.config, 16) if cache else None
        compiled = torch.compile(model, backend="eager")
        steps = (prompt(1, 9), prompt(1, 10)[:, 9:]) if cache else (prompt(1, 9),)
        for ids, wanted in zip(steps, theirs):
            ours = compiled(ids, past_key_values=held).logits
            torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-4)
        torch._dynamo.reset()
