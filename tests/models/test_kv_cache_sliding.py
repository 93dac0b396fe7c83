"""A StaticKVCache whose sliding layers keep rings of their window."""

from __future__ import annotations

import pytest
import torch

import fasttps
from fasttps.kv_cache import SlidingKVLayer
from tests.support.families import FAMILIES, WINDOW
from tests.support.llama import generate, left_padded, logits, prompt

ATOL_F32 = 5e-4
SPARE = 4


def family(name="gemma3", patched=True):
    model = FAMILIES[name].model()
    if patched:
        fasttps.patch(model)
    return model


def ring_of(model, room=64, dtype=None, spare=SPARE):
    return fasttps.StaticKVCache(model.config, room, dtype, spare_slots=spare)


def test_a_sliding_layer_keeps_its_window_and_the_spare_slots():
    model = family()
    cache = ring_of(model)
    logits(model, prompt(2, 20), cache=cache)
    assert cache.is_sliding == [True, False, True, False]
    assert [layer.keys.size(2) for layer in cache.layers] == [WINDOW + SPARE, 64] * 2
    assert cache.get_seq_length() == cache.get_seq_length(1) == 20
    assert cache.get_mask_sizes(3, 0) == (WINDOW - 1 + 3, 20 - WINDOW + 1)
    assert cache.get_mask_sizes(3, 1) == (23, 0)


def test_room_for_less_than_the_window_is_no_ring():
    model = family()
    cache = ring_of(model, WINDOW + SPARE)
    assert not any(isinstance(layer, SlidingKVLayer) for layer in cache.layers)
    wanted = generate(family(patched=False), prompt(1, 5), max_new_tokens=6, min_new_tokens=6)
    ours = generate(model, prompt(1, 5), cache=cache, max_new_tokens=6, min_new_tokens=6)
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma2", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("chunks", [[30], [1] * 30, [8, 1, 1, 20], [5, 25], [6, 5, 19]])
def test_prefill_in_chunks(name, chunks):
    """One token more than the spare slots is taken at once; what is more, in pieces."""
    model, ids = family(name), prompt(2, 30)
    cache = ring_of(model, 30)
    ours = torch.cat([logits(model, x, cache=cache) for x in ids.split(chunks, dim=1)], dim=1)
    theirs = logits(family(name, patched=False), ids)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ATOL_F32)


@pytest.mark.parametrize("chunks", [[30], [8, 1, 1, 20], [3, 17, 10]])
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_an_unpatched_model_gets_keys_by_position(chunks, dtype):
    """Through `update`, what it gets is as long as `get_mask_sizes` says."""
    model, ids = family(patched=False), prompt(2, 30)
    cache = ring_of(model, 30, dtype)
    ours = torch.cat([logits(model, x, cache=cache) for x in ids.split(chunks, dim=1)], dim=1)
    theirs = logits(model, ids)
    if dtype is None:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=ATOL_F32)
    assert (ours - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.parametrize("kind", ["greedy", "beams", "left padding", "prompt lookup"])
def test_generate_with_an_unpatched_model(kind):
    model = family(patched=False)
    inputs = left_padded(prompt(2, 9), [0, 4 if kind == "left padding" else 0])
    if kind == "prompt lookup":
        inputs = left_padded(prompt(1, 5).repeat(1, 3), [0])
    options = {"beams": {"num_beams": 3}, "prompt lookup": {"prompt_lookup_num_tokens": 3}}
    theirs = generate(model, inputs, **({} if kind == "prompt lookup" else options.get(kind, {})))
    ours = generate(model, inputs, cache=ring_of(model, 40), **options.get(kind, {}))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("removed", [1, SPARE, SPARE + 1])
def test_crop_takes_back_the_spare_slots(removed):
    model, ids, junk = family(), prompt(1, 30), prompt(1, removed, seed=9)
    cache = ring_of(model)
    logits(model, ids[:, :20], cache=cache)
    logits(model, junk, cache=cache)
    cache.crop(-removed)
    ours = logits(model, ids[:, 20:], cache=cache)
    torch.testing.assert_close(ours, logits(model, ids)[:, 20:], rtol=0, atol=ATOL_F32)


def test_crop_of_more_than_it_kept_is_refused():
    model = family()
    cache = ring_of(model)
    logits(model, prompt(1, 30), cache=cache)
    with pytest.raises(
        ValueError, match=r"crop to 24 tokens wanted the 7 tokens .* spare_slots = 4"
    ):
        cache.crop(-6)
    with pytest.raises(ValueError, match="crop to 5 tokens"):
        cache.crop(5)
    assert cache.get_seq_length() == 30
    cache.crop(-5)
    with pytest.raises(ValueError, match="crop to 24 tokens"):  # twice makes no difference
        cache.crop(-1)
    cache.crop(-25)  # all of it
    assert torch.equal(
        logits(model, prompt(1, 9), cache=cache), logits(model, prompt(1, 9), cache=ring_of(model))
    )


@pytest.mark.parametrize("new_tokens", [1, SPARE + 1, 12])
def test_a_step_that_was_broken_off(new_tokens):
    """It leaves no trace, or where it wrote over the window, an error."""
    model, ids = family(), prompt(1, 32)
    wanted = logits(model, ids)
    cache = ring_of(model)
    logits(model, ids[:, :20], cache=cache)

    def interrupted(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[2].mlp.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids[:, 20 : 20 + new_tokens], cache=cache)
    hook.remove()
    assert cache.get_seq_length() == 20
    if new_tokens > SPARE + 1:
        with pytest.raises(ValueError, match="a step after one that was broken off"):
            logits(model, ids[:, 20:21], cache=cache)
        cache.reset()
        ours = logits(model, ids, cache=cache)
        torch.testing.assert_close(ours, wanted, rtol=0, atol=ATOL_F32)
        return
    ours = logits(model, ids[:, 20:], cache=cache)
    torch.testing.assert_close(ours, wanted[:, 20:], rtol=0, atol=ATOL_F32)


def test_a_prompt_that_was_broken_off():
    model, ids = family(), prompt(1, 32)
    cache = ring_of(model)

    def interrupted(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids, cache=cache)
    hook.remove()
    ours = torch.cat([logits(model, x, cache=cache) for x in ids.split(16, dim=1)], dim=1)
    torch.testing.assert_close(ours, logits(model, ids), rtol=0, atol=ATOL_F32)


def test_overflow_is_an_error_before_anything_is_written():
    model = family()
    cache = ring_of(model, 24)
    logits(model, prompt(1, 20), cache=cache)
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(ValueError, match=r"at least 25 .*got 24; grow\(max_seq_len\)"):
        logits(model, prompt(1, 5), cache=cache)
    assert all(torch.equal(layer.keys, old) for layer, old in zip(cache.layers, before))
    assert cache.get_seq_length() == 20


def test_sequences_move_with_their_rings():
    model, ids = family(), prompt(3, 30)
    cache = ring_of(model)
    logits(model, ids[:, :20], cache=cache)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    ids = ids[order]
    ours = logits(model, ids[:, 20:25], cache=cache)
    torch.testing.assert_close(ours, logits(model, ids)[:, 20:25], rtol=0, atol=ATOL_F32)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    ids = ids[[1, 1]]
    ours = logits(model, ids[:, 25:], cache=cache)
    torch.testing.assert_close(ours, logits(model, ids)[:, 25:], rtol=0, atol=ATOL_F32)


def test_a_query_that_looks_ahead_is_refused():
    model = family("mistral")
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    cache = ring_of(model)
    with pytest.raises(ValueError, match="on a sliding layer of a cache a query may not see later"):
        logits(model, prompt(1, 6), cache=cache, attention_mask=mask)
    assert cache.get_seq_length() == 0


def test_a_window_that_is_wider_than_the_ring_is_refused():
    model = family("mistral")
    cache = ring_of(model)
    model.config.sliding_window = 2 * WINDOW
    with pytest.raises(ValueError, match=f"window wanted at most the {WINDOW} .* got {2 * WINDOW}"):
        logits(model, prompt(1, 6), cache=cache)
