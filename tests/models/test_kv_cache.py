"""StaticKVCache by itself: what it holds after every call, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import fasttps
from tests.support.errors import bits
from tests.support.llama import generate, left_padded, logits, prompt, tiny_config, tiny_llama

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 12


def cache_of(max_seq_len=8, **changes):
    return fasttps.StaticKVCache(tiny_config(**changes), max_seq_len)


def rows(batch, new_tokens, first=0, dtype=torch.float32):
    """Keys that number row and token, and other values: [batch, heads, new_tokens, head_dim]."""
    token = torch.arange(first, first + new_tokens).view(1, 1, -1, 1)
    sequence = 10 * (1 + torch.arange(batch)).view(-1, 1, 1, 1)
    keys = (sequence + token).expand(batch, KV_HEADS, new_tokens, HEAD_DIM).to(dtype)
    return keys, -keys


def append(cache, new_tokens, batch=3, first=0, dtype=torch.float32):
    """Into every layer; returns what the last one has now."""
    for layer in range(LAYERS):
        keys, values = cache.update(*rows(batch, new_tokens, first, dtype), layer)
    return keys, values


def held(cache, layer=0):
    """(keys, values) in a layer, the first head's first element: [batch, tokens]."""
    keys, values = cache.layers[layer].keys, cache.layers[layer].values
    filled = cache.get_seq_length(layer)
    assert torch.equal(keys[:, :, :filled], -values[:, :, :filled])
    return keys[:, 0, :filled, 0].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_update_returns_what_is_in_the_cache(dtype):
    cache = cache_of()
    for first, new_tokens in ((0, 3), (3, 1), (4, 4)):
        keys, values = append(cache, new_tokens, first=first, dtype=dtype)
        wanted = rows(3, first + new_tokens, dtype=dtype)
        assert keys.dtype == dtype
        assert torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])
        assert cache.get_seq_length() == first + new_tokens


def test_allocated_once_and_written_in_place():
    cache = cache_of()
    append(cache, 3)
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    for first in range(3, 8):
        append(cache, 1, first=first)
        cache.reorder_cache(torch.tensor([0, 1, 2]))
    cache.reset()
    append(cache, 8)
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
    assert cache.layers[0].keys.shape == (3, KV_HEADS, 8, HEAD_DIM)


def test_what_transformers_asks():
    cache = cache_of()
    assert len(cache.layers) == LAYERS and not cache.is_initialized
    assert cache.get_seq_length() == 0 and isinstance(cache.get_seq_length(), int)
    append(cache, 3)
    assert cache.is_initialized
    assert cache.get_seq_length(2) == 3 and isinstance(cache.get_seq_length(), int)
    assert cache.get_mask_sizes(2, 0) == (5, 0)
    assert cache.layers[0].get_mask_sizes(torch.arange(3, 5)) == (5, 0)
    assert cache.get_max_length() == cache.get_max_length(1) == 8
    assert cache.get_max_cache_shape() == cache.layers[0].get_max_cache_shape() == 8
    assert cache.is_compileable is False
    assert cache.is_sliding == [False] * LAYERS
    assert all(layer.is_croppable for layer in cache.layers)
    assert cache.layers[0].batch_size == cache.layers[0].max_batch_size == 3
    assert cache.layers[0].max_cache_len == 8
    assert repr(cache) == "StaticKVCache(3 layers, 3 of 8 tokens)"


def test_early_initialization():
    cache = cache_of()
    cache.early_initialization(2, KV_HEADS, HEAD_DIM, torch.bfloat16, torch.device("cpu"))
    assert cache.is_initialized and cache.get_seq_length() == 0
    assert cache.layers[2].values.shape == (2, KV_HEADS, 8, HEAD_DIM)
    append(cache, 2, batch=2, dtype=torch.bfloat16)
    assert held(cache) == [[10, 11], [20, 21]]


@pytest.mark.parametrize(
    ("tokens", "left"), [(-2, 5), (0, 7), (5, 5), (-7, 0), (-9, 0), (7, 7), (9, 7)]
)
def test_crop_in_both_conventions(tokens, left):
    """Negative: remove so many. Positive: keep so many. 0: nothing."""
    cache = cache_of()
    cache.crop(tokens)
    assert cache.get_seq_length() == 0
    append(cache, 7, batch=1)
    cache.crop(tokens)
    assert [cache.get_seq_length(layer) for layer in range(LAYERS)] == [left] * LAYERS
    append(cache, 1, batch=1, first=50)
    assert held(cache) == [[*range(10, 10 + left), 60]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reorder_takes_keys_and_values(dtype):
    """Elsewhere V came from K, float32 alone was skipped, or row 2 was read after it was lost."""
    cache = cache_of()
    append(cache, 2, dtype=dtype)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    for layer in range(LAYERS):
        assert held(cache, layer) == [[30, 31], [10, 11], [10, 11]]
    append(cache, 1, first=2, dtype=dtype)
    assert held(cache) == [[30, 31, 12], [10, 11, 22], [10, 11, 32]]


def test_the_batch_may_grow_and_shrink():
    cache = cache_of()
    append(cache, 2, batch=2)
    cache.batch_repeat_interleave(2)
    assert held(cache, 2) == [[10, 11], [10, 11], [20, 21], [20, 21]]
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert held(cache, 2) == [[20, 21], [10, 11]]
    cache.batch_select_indices(torch.tensor([False, True]))
    assert held(cache, 2) == [[10, 11]]
    cache.reorder_cache(torch.tensor([0, 0, 0]))
    append(cache, 1, first=2)
    assert held(cache, 2) == [[10, 11, 12], [10, 11, 22], [10, 11, 32]]
    assert cache.layers[2].keys.shape == (3, KV_HEADS, 8, HEAD_DIM)
    assert cache.layers[0].batch_size == 3


def test_an_empty_cache_has_nothing_to_reorder():
    cache = cache_of()
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(("filled", "new_tokens"), [(8, 1), (6, 3), (0, 9)])
def test_overflow_is_an_error_before_anything_is_written(filled, new_tokens):
    """A position equal to the capacity went past the end elsewhere."""
    cache = cache_of()
    append(cache, 8)
    cache.crop(-(8 - filled))
    before = [layer.keys.clone() for layer in cache.layers]
    wanted = filled + new_tokens
    with pytest.raises(ValueError, match=rf"at least {wanted} .*got 8; grow\(max_seq_len\)"):
        append(cache, new_tokens)
    assert all(torch.equal(layer.keys, old) for layer, old in zip(cache.layers, before))
    assert cache.get_seq_length() == filled


@pytest.mark.parametrize("patched", [True, False])
def test_overflow_in_a_model(patched):
    model = tiny_llama()
    patch = fasttps.patch(model) if patched else None
    cache = fasttps.StaticKVCache(model.config, 10)
    logits(model, prompt(1, 8), cache=cache)
    before = [layer.keys[:, :, :8].clone() for layer in cache.layers]
    with pytest.raises(ValueError, match="max_seq_len wanted at least 11"):
        logits(model, prompt(1, 3), cache=cache)
    assert [cache.get_seq_length(layer) for layer in range(LAYERS)] == [8] * LAYERS
    assert all(torch.equal(layer.keys[:, :, :8], old) for layer, old in zip(cache.layers, before))
    logits(model, prompt(1, 2), cache=cache)
    if patch is not None:
        patch.undo()


def test_exactly_enough_room():
    model = tiny_llama()
    with fasttps.patch(model):
        # The last token that is said is not fed back.
        cache = fasttps.StaticKVCache(model.config, 9 + 12 - 1)
        generate(model, prompt(1, 9), cache=cache)
        assert cache.get_seq_length() == 20


def test_drafts_need_room_of_their_own():
    """Prompt lookup runs past a static cache elsewhere; here the error says how much it takes."""
    model = tiny_llama()
    ids = prompt(1, 5).repeat(1, 4)
    with fasttps.patch(model):
        wanted = generate(model, ids)
        cache = fasttps.StaticKVCache(model.config, 20 + 12 + 3)
        ours = generate(model, ids, cache=cache, prompt_lookup_num_tokens=3)
        assert torch.equal(ours, wanted)
        with pytest.raises(ValueError, match="for the drafts too"):
            small = fasttps.StaticKVCache(model.config, 21)
            generate(model, ids, cache=small, prompt_lookup_num_tokens=3)


def fill_with_others(cache, wrong, new_tokens=2):
    """Tokens of another batch, dtype or number of heads than a tiny model's of batch 1."""
    keys, values = rows(1 + (wrong == "batch"), new_tokens)
    if wrong == "heads":
        keys, values = keys.repeat(1, 2, 1, 1), values.repeat(1, 2, 1, 1)
    dtype = torch.bfloat16 if wrong == "dtype" else torch.float32
    for layer in range(LAYERS):
        cache.update(keys.to(dtype), values.to(dtype), layer)


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("wrong", ["batch", "dtype", "heads"])
def test_a_cache_with_tokens_of_another_shape_is_refused(patched, wrong):
    model = tiny_llama()
    patch = fasttps.patch(model) if patched else None
    cache = fasttps.StaticKVCache(model.config, 10)
    fill_with_others(cache, wrong)
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(ValueError, match=r"^StaticKVCache: .* like the 2 tokens in the cache"):
        logits(model, prompt(1, 3), cache=cache)
    assert cache.get_seq_length() == 2
    assert all(torch.equal(bits(x.keys), bits(old)) for x, old in zip(cache.layers, before))
    if patch is not None:
        patch.undo()


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("wrong", ["batch", "dtype", "heads"])
@pytest.mark.parametrize("how", ["reset", "crop"])
def test_an_emptied_cache_takes_a_prompt_of_another_shape(patched, wrong, how):
    """The first step pinned its batch and dtype for good."""
    model = tiny_llama()
    patch = fasttps.patch(model) if patched else None
    wanted = generate(model, prompt(1, 3))
    cache = fasttps.StaticKVCache(model.config, 15)
    fill_with_others(cache, wrong)
    cache.reset() if how == "reset" else cache.crop(-2)
    assert torch.equal(generate(model, prompt(1, 3), cache=cache), wanted)
    if patch is not None:
        patch.undo()


def test_a_first_step_that_failed_pins_nothing():
    cache = cache_of()
    keys, values = rows(3, 2)
    with pytest.raises(TypeError, match=r"^StaticKVCache: key wanted float32.*float64"):
        cache.update(keys.double(), values.double(), 0)
    assert not cache.is_initialized
    append(cache, 2)
    assert held(cache, 2) == [[10, 11], [20, 21], [30, 31]]


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("filled", [0, 6])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_step_that_was_broken_off_leaves_no_trace(patched, filled, layer):
    """Ctrl-C between two layers: the next step begins where all of them are."""
    model, ids = tiny_llama(), prompt(1, 9)
    patch = fasttps.patch(model) if patched else None
    wanted = logits(model, ids)[:, filled:]
    cache = fasttps.StaticKVCache(model.config, 9)
    if filled:
        logits(model, ids[:, :filled], cache=cache)

    def interrupted(*args):
        raise KeyboardInterrupt

    for new_tokens in (3, 1):
        hook = model.model.layers[layer].mlp.register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            logits(model, ids[:, filled:][:, :new_tokens], cache=cache)
        hook.remove()
        if layer == LAYERS - 1:  # they are all in the cache
            cache.crop(-new_tokens)
        assert cache.get_seq_length() == filled
    ours = logits(model, ids[:, filled:], cache=cache)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-4)
    if patch is not None:
        patch.undo()


def test_crop_after_a_step_that_was_broken_off():
    cache = cache_of()
    append(cache, 3)
    cache.update(*rows(3, 2, first=3), 0)
    cache.crop(-1)
    assert [layer.filled for layer in cache.layers] == [2] * LAYERS
    append(cache, 1, first=50)
    assert held(cache) == [[10, 11, 60], [20, 21, 70], [30, 31, 80]]


@pytest.mark.parametrize("modes", [("inference", "no_grad"), ("no_grad", "inference")])
@pytest.mark.parametrize("patched", [True, False])
def test_filled_in_one_grad_mode_and_used_in_another(modes, patched):
    """A static cache that was filled in inference mode fails outside it elsewhere."""
    model = tiny_llama()
    theirs = logits(model, prompt(1, 9))
    contexts = {"inference": torch.inference_mode, "no_grad": torch.no_grad}
    patch = fasttps.patch(model) if patched else None
    cache = fasttps.StaticKVCache(model.config, 9)
    outs = []
    for mode, ids in zip(modes, prompt(1, 9).split([6, 3], dim=1)):
        with contexts[mode]():
            outs.append(model(ids, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(outs, dim=1), theirs, rtol=0, atol=2e-4)
    if patch is not None:
        patch.undo()


@pytest.mark.parametrize("kind", ["greedy", "beams", "left padding", "prompt lookup"])
def test_in_an_unpatched_model(kind):
    model = tiny_llama()
    inputs = left_padded(prompt(2, 9), [0, 4 if kind == "left padding" else 0])
    if kind == "prompt lookup":
        inputs = left_padded(prompt(1, 5).repeat(1, 3), [0])
    options = {"beams": {"num_beams": 3}, "prompt lookup": {"prompt_lookup_num_tokens": 3}}
    theirs = generate(model, inputs, **({} if kind == "prompt lookup" else options.get(kind, {})))
    cache = fasttps.StaticKVCache(model.config, 40)
    ours = generate(model, inputs, cache=cache, **options.get(kind, {}))
    assert torch.equal(ours, theirs)


def test_slots_past_the_length_never_contribute():
    """Whatever they hold: 0 times NaN is NaN."""
    model = tiny_llama()
    theirs = generate(model, prompt(2, 9))
    with fasttps.patch(model):
        cache = fasttps.StaticKVCache(model.config, 40)
        cache.early_initialization(2, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
        for layer in cache.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.inf)
        assert torch.equal(generate(model, prompt(2, 9), cache=cache), theirs)


@pytest.mark.parametrize("max_seq_len", [3.5, float("nan"), True, "3", None, 0, -1, 2**70])
def test_max_seq_len_is_a_number_of_tokens(max_seq_len):
    error = ValueError if type(max_seq_len) is int else TypeError
    with pytest.raises(error, match=r"^StaticKVCache: max_seq_len wanted a"):
        cache_of(max_seq_len)


def test_layers_that_keep_something_else():
    config = tiny_config()
    config.layer_types = ["full_attention", "indexed_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"config wanted layers of .*got \['indexed_attention'\]"):
        fasttps.StaticKVCache(config, 8)
