"""torch.compile of a patched model: one graph however far it goes, and the same logits."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code
from transformers import DynamicCache

import fasttps
from tests.support.families import FAMILIES, each_family
from tests.support.llama import cache_name, generate, left_padded, logits, prompt

ATOL_F32 = 5e-4
PROMPT, STEPS = 5, 64


class Counter:
    """A backend that runs a graph as it is, and counts the graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step_by_step(model, ids, cache, forward):
    """The prompt, then token by token through `forward`: logits [batch, tokens, vocab]."""
    named = {cache_name(model): cache}
    outs = [logits(model, ids[:, :PROMPT], cache=cache)]
    with torch.no_grad():
        for at in range(PROMPT, ids.size(1)):
            position = torch.tensor([[at]])
            outs.append(forward(ids[:, at : at + 1], position_ids=position, **named).logits)
    return torch.cat(outs, dim=1)


def compiled(model, ids, backend, **options):
    cache = fasttps.StaticKVCache(model.config, ids.size(1), **options)
    forward = torch.compile(model, backend=backend, fullgraph=True)
    return step_by_step(model, ids, cache, forward)


@each_family
def test_one_graph_for_every_step(family):
    """Past the window, round the ring, and past the length at which longrope changes."""
    plain, patched = family.model(), family.model()
    ids = prompt(2, PROMPT + STEPS)
    fasttps.patch(patched)
    counter = Counter()
    ours = compiled(patched, ids, counter, spare_slots=3)
    assert counter.graphs == 1
    theirs = step_by_step(plain, ids, DynamicCache(config=plain.config), plain)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ATOL_F32)


@pytest.mark.parametrize("name", ["llama3.1", "mistral"])
@pytest.mark.slow
def test_inductor(name):
    """The graph of Llama, and of a ring; nothing as large as a cache is copied."""
    family = FAMILIES[name]
    plain, patched = family.model(), family.model()
    ids = prompt(2, PROMPT + STEPS)
    fasttps.patch(patched)
    with fresh_inductor_cache():
        ours, (code, *more) = run_and_get_code(compiled, patched, ids, "inductor", spare_slots=3)
    assert not more
    theirs = step_by_step(plain, ids, DynamicCache(config=plain.config), plain)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ATOL_F32)
    kv_heads, slots = 2, ids.size(1) if name == "llama3.1" else 7 + 3
    assert f"empty_strided_cpu((2, {kv_heads}, {slots}" not in code
    assert "rope_attention_decode" in code and "auto_functionalized" not in code


@each_family
def test_a_prompt_in_a_graph(family):
    """In an empty cache, which must have its memory before."""
    plain, patched = family.model(), family.model()
    fasttps.patch(patched)
    ids, config = prompt(2, 20), patched.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = fasttps.StaticKVCache(config, 24, spare_slots=3)
    cache.early_initialization(
        2, config.num_key_value_heads, head_dim, torch.float32, torch.device("cpu")
    )
    counter = Counter()
    forward = torch.compile(patched, backend=counter, fullgraph=True)
    with torch.no_grad():
        ours = forward(ids, **{cache_name(patched): cache}).logits
    assert counter.graphs == 1 and cache.get_seq_length() == 20
    torch.testing.assert_close(ours, logits(plain, ids), rtol=0, atol=ATOL_F32)
    ours = logits(patched, prompt(2, 1, seed=3), cache=cache)  # and on, without a graph
    theirs = logits(plain, torch.cat((ids, prompt(2, 1, seed=3)), dim=1))[:, -1:]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ATOL_F32)


def test_a_prompt_in_a_graph_without_memory():
    patched = FAMILIES["llama3.1"].model()
    fasttps.patch(patched)
    cache = fasttps.StaticKVCache(patched.config, 24)
    forward = torch.compile(patched, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="call early_initialization"):
        forward(prompt(2, 20), **{cache_name(patched): cache})


@pytest.mark.parametrize("padding", [[0, 0], [0, 4]])
def test_generate(padding):
    """Two graphs: the prompt, and every token after it."""
    family = FAMILIES["gemma3"]
    plain, patched = family.model(), family.model()
    fasttps.patch(patched)
    inputs = left_padded(prompt(2, 13), padding)
    wanted = generate(plain, inputs, max_new_tokens=32, min_new_tokens=32)
    config, counter = patched.config, Counter()
    cache = fasttps.StaticKVCache(config, 60, spare_slots=3)
    cache.early_initialization(2, 2, config.head_dim, torch.float32, torch.device("cpu"))
    patched.forward = torch.compile(patched.forward, backend=counter, fullgraph=True)
    ours = generate(patched, inputs, cache=cache, max_new_tokens=32, min_new_tokens=32)
    assert torch.equal(ours, wanted)
    assert counter.graphs == 2
