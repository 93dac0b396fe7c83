"""A patched Llama says what the unpatched one says: float32, greedy, token for token."""

from __future__ import annotations

import pytest
import torch

import fasttps
from tests.support.llama import FUSED_MODULES, generate, left_padded, logits, prompt, tiny_llama

# Two orders of adding up float32 products in three layers of activations near 1.
ATOL_F32 = 2e-4

CACHES = ["dynamic", "static_kv_cache", "hf_static"]


def cache_options(kind, model, max_seq_len):
    """`generate` options that choose a cache."""
    if kind == "static_kv_cache":
        return {"cache": fasttps.StaticKVCache(model.config, max_seq_len)}
    return {"cache_implementation": "static"} if kind == "hf_static" else {}


@pytest.fixture(scope="module")
def pair():
    """The same model twice, the second one patched."""
    plain, patched = tiny_llama(), tiny_llama()
    patch = fasttps.patch(patched)
    yield plain, patched
    patch.undo()


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("length", [1, 2, 8, 9, 33])  # around the decode op's limit of 8
def test_greedy(pair, kind, length):
    plain, patched = pair
    ids = prompt(2, length)
    assert torch.equal(
        generate(patched, ids, **cache_options(kind, patched, length + 12)), generate(plain, ids)
    )


@pytest.mark.parametrize("kind", CACHES)
def test_left_padding(pair, kind):
    plain, patched = pair
    inputs = left_padded(prompt(3, 11), [0, 4, 10])
    ours = generate(patched, inputs, **cache_options(kind, patched, 23))
    assert torch.equal(ours, generate(plain, inputs))


@pytest.mark.parametrize("kind", CACHES)
def test_left_padding_changes_nothing_for_the_row(pair, kind):
    _, patched = pair
    ids = prompt(1, 7)
    padded = left_padded(torch.nn.functional.pad(ids, (5, 0)), [5])
    ours = generate(patched, padded, **cache_options(kind, patched, 24))
    assert torch.equal(ours[:, 5:], generate(patched, ids))


@pytest.mark.parametrize("kind", CACHES)
def test_beams(pair, kind):
    plain, patched = pair
    inputs = left_padded(prompt(2, 9), [0, 3])
    options = {"num_beams": 3, "num_return_sequences": 2}
    ours = generate(patched, inputs, **options, **cache_options(kind, patched, 21))
    assert torch.equal(ours, generate(plain, inputs, **options))


@pytest.mark.parametrize("kind", CACHES)
def test_sampling_draws_the_same_tokens(pair, kind):
    plain, patched = pair
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "num_return_sequences": 3}
    torch.manual_seed(5)
    theirs = generate(plain, prompt(1, 9), **options)
    torch.manual_seed(5)
    ours = generate(patched, prompt(1, 9), **options, **cache_options(kind, patched, 21))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["dynamic", "static_kv_cache"])
def test_prompt_lookup(pair, kind):
    plain, patched = pair
    ids = prompt(1, 5).repeat(1, 4)  # repeats, so that there is something to look up
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 30}
    ours = generate(patched, ids, **options, **cache_options(kind, patched, 54))
    assert torch.equal(ours, generate(plain, ids, max_new_tokens=30))


@pytest.mark.parametrize("kind", ["dynamic", "static_kv_cache"])
def test_assisted(pair, kind):
    plain, patched = pair
    with fasttps.patch(tiny_llama(3, num_hidden_layers=1)) as assistant_patch:
        assert assistant_patch.report().fused
        assistant = tiny_llama(3, num_hidden_layers=1)
        ids = prompt(1, 9)
        ours = generate(patched, ids, assistant_model=assistant, **cache_options(kind, patched, 40))
    assert torch.equal(ours, generate(plain, ids))


@pytest.mark.parametrize("chunks", [[20], [1] * 20, [8, 12], [9, 1, 10], [3, 17]])
def test_prefill_in_chunks(pair, chunks):
    plain, patched = pair
    ids, cache = prompt(2, 20), fasttps.StaticKVCache(patched.config, 20)
    pieces = [logits(patched, piece, cache=cache) for piece in ids.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits(plain, ids), rtol=0, atol=ATOL_F32)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("kind", ["dynamic", "static_kv_cache"])
def test_prefill_chunk_size_of_generate(pair, kind):
    plain, patched = pair
    ids = prompt(2, 20)
    ours = generate(patched, ids, prefill_chunk_size=6, **cache_options(kind, patched, 32))
    assert torch.equal(ours, generate(plain, ids))


def test_continued_conversation(pair):
    plain, patched = pair
    cache = fasttps.StaticKVCache(patched.config, 64)
    first = generate(patched, prompt(1, 9), cache=cache)
    assert torch.equal(first, generate(plain, prompt(1, 9)))
    turn = torch.cat([first, prompt(1, 6, seed=8)], dim=1)
    assert torch.equal(generate(patched, turn, cache=cache), generate(plain, turn))


def test_a_cache_serves_the_next_prompt_after_reset(pair):
    plain, patched = pair
    cache = fasttps.StaticKVCache(patched.config, 40)
    for seed in (1, 2):
        cache.reset()
        ids = prompt(1, 9 + seed, seed)
        assert torch.equal(generate(patched, ids, cache=cache), generate(plain, ids))


def test_cropped_tokens_leave_no_trace(pair):
    """Roll-back of a static cache: rejected draft tokens stayed visible elsewhere."""
    plain, patched = pair
    ids, cache = prompt(1, 8), fasttps.StaticKVCache(patched.config, 16)
    logits(patched, ids[:, :6], cache=cache)
    logits(patched, prompt(1, 3, seed=9), cache=cache)
    cache.crop(-3)
    ours = logits(patched, ids[:, 6:], cache=cache)
    torch.testing.assert_close(ours, logits(plain, ids)[:, 6:], rtol=0, atol=ATOL_F32)


def test_a_model_without_head():
    model = tiny_llama(head=False)
    ids = prompt(2, 9)
    theirs = logits(model, ids)
    with fasttps.patch(model) as patch:
        assert len(patch.report().fused) == FUSED_MODULES - 2
        torch.testing.assert_close(logits(model, ids), theirs, rtol=0, atol=ATOL_F32)
        cache = fasttps.StaticKVCache(model.config, 9)
        torch.testing.assert_close(logits(model, ids, cache=cache), theirs, rtol=0, atol=ATOL_F32)


def test_no_cache_at_all(pair):
    plain, patched = pair
    ids = prompt(2, 9)
    ours = logits(patched, ids, use_cache=False)
    torch.testing.assert_close(ours, logits(plain, ids), rtol=0, atol=ATOL_F32)


@pytest.mark.parametrize("rope", ["linear", "llama3", "dynamic"])
def test_rope_variants(rope):
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
    if rope == "llama3":
        parameters |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    model = tiny_llama(rope_parameters=parameters, max_position_embeddings=16)
    ids = prompt(1, 24)  # past 16: the dynamic variant changes its frequencies
    theirs = generate(model, ids)
    with fasttps.patch(model):
        assert torch.equal(
            generate(model, ids, cache=fasttps.StaticKVCache(model.config, 40)), theirs
        )
        assert torch.equal(generate(model, ids), theirs)


def test_attention_and_mlp_biases():
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    theirs = generate(model, prompt(2, 9))
    with fasttps.patch(model) as patch:
        assert len(patch.report().fused) == FUSED_MODULES
        cache = fasttps.StaticKVCache(model.config, 21)
        assert torch.equal(generate(model, prompt(2, 9), cache=cache), theirs)


@pytest.mark.parametrize("part", ["attention", "mlp", "lm_head"])
def test_one_part_alone(part):
    model = tiny_llama()
    theirs = generate(model, prompt(2, 9))
    with fasttps.patch(
        model, **{"attention": False, "mlp": False, "lm_head": False, part: True}
    ) as patch:
        assert {entry.reason for entry in patch.report().skipped} == {"not asked for"}
        cache = fasttps.StaticKVCache(model.config, 21)
        assert torch.equal(generate(model, prompt(2, 9), cache=cache), theirs)
