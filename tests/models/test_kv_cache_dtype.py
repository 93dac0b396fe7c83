"""A StaticKVCache that holds another dtype than the keys have: int8 with scales, or a float."""

from __future__ import annotations

import copy

import pytest
import torch

import fasttps
from tests.support.llama import (
    LAYERS,
    generate,
    left_padded,
    logits,
    prompt,
    tiny_config,
    tiny_llama,
)

KV_HEADS, HEAD_DIM = 2, 12
# An int8 row is off by half of max|row| / 127 an element, bfloat16 by 2^-9 of it.
RELATIVE = {torch.int8: 0.03, torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 1e-5}


def off(ours, theirs):
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


def cache_of(model, room, dtype):
    return fasttps.StaticKVCache(model.config, room, dtype)


def rows(batch, new_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, batch, KV_HEADS, new_tokens, HEAD_DIM)
    return torch.randn(shape, generator=generator).unbind()


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("patched", [True, False])
def test_a_model_says_nearly_the_same(dtype, patched):
    """Unpatched it goes through `update`, patched through one op."""
    model = tiny_llama()
    theirs = logits(model, prompt(2, 20))
    patch = fasttps.patch(model) if patched else None
    cache = cache_of(model, 20, dtype)
    pieces = [logits(model, piece, cache=cache) for piece in prompt(2, 20).split([9, 1, 10], 1)]
    ours = torch.cat(pieces, dim=1)
    assert ours.dtype == torch.float32 and cache.layers[0].keys.dtype == dtype
    assert off(ours, theirs) < RELATIVE[dtype]
    if patch is not None:
        patch.undo()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_rows_of_every_float(dtype):
    model = tiny_llama(dtype=dtype)
    theirs = logits(model, prompt(2, 9))
    with fasttps.patch(model, kv="int8") as patch:
        cache = patch.cache(9)
        assert off(logits(model, prompt(2, 9), cache=cache), theirs) < 0.04
        assert cache.layers[0].keys.dtype == torch.int8


def test_patched_and_unpatched_fill_an_int8_cache_alike():
    model = tiny_llama()
    caches = [cache_of(model, 9, torch.int8) for _ in range(2)]
    logits(model, prompt(2, 9), cache=caches[0])
    with fasttps.patch(model):
        logits(model, prompt(2, 9), cache=caches[1])
    first, second = (cache.layers[0] for cache in caches)
    assert (first.keys.int() - second.keys.int()).abs().max() <= 1
    torch.testing.assert_close(first.k_scale, second.k_scale, rtol=1e-4, atol=0)
    torch.testing.assert_close(first.v_scale, second.v_scale, rtol=1e-4, atol=0)


def test_update_returns_what_the_rows_stand_for():
    cache = fasttps.StaticKVCache(tiny_config(), 8, torch.int8)
    keys, values = rows(3, 4)
    for layer in range(LAYERS):
        ours = cache.update(keys, values, layer)
    for got, wanted in zip(ours, (keys, values)):
        step = wanted.abs().amax(-1, keepdim=True) / 127
        assert got.dtype == torch.float32
        assert ((got - wanted).abs() <= step * 0.5001).all()
    layer = cache.layers[0]
    assert layer.keys.dtype == torch.int8 and layer.k_scale.shape == (3, KV_HEADS, 8)


def test_scales_follow_their_rows():
    """Beams, repeats and selections; a scale that stayed behind makes other keys."""
    cache = fasttps.StaticKVCache(tiny_config(), 8, torch.int8)
    keys, values = rows(3, 4)
    keys *= torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1)
    for layer in range(LAYERS):
        held = cache.update(keys, values, layer)[0].clone()
    order = torch.tensor([2, 0, 0])

    def now():
        layer = cache.layers[1]
        return layer._rows(layer.keys, layer.k_scale, layer.filled, torch.float32)

    cache.reorder_cache(order)
    assert torch.equal(now(), held[order])
    cache.batch_repeat_interleave(2)
    assert torch.equal(now(), held[order].repeat_interleave(2, dim=0))
    cache.batch_select_indices(torch.tensor([4, 1]))
    assert torch.equal(now(), held[[0, 2]])
    cache.crop(-1)
    assert torch.equal(now(), held[[0, 2], :, :3])
    assert torch.equal(copy.deepcopy(cache).layers[1].k_scale, cache.layers[1].k_scale)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_generate_into_int8(options):
    """In every way of generating; far apart logits, so that a rounded cache says the same."""
    model = tiny_llama()
    for parameter in (model.lm_head.weight,):
        parameter.data *= 3
    one = "prompt_lookup_num_tokens" in options
    inputs = prompt(1, 9) if one else left_padded(prompt(2, 9), [0, 3])
    with fasttps.patch(model, kv="int8") as patch:
        first = generate(model, inputs, cache=patch.cache(40), **options)
        assert torch.equal(generate(model, inputs, cache=patch.cache(40), **options), first)


def test_what_a_cache_of_the_patch_holds():
    model = tiny_llama()
    for kv, dtype in ((None, torch.float32), ("int8", torch.int8), ("bf16", torch.bfloat16)):
        with fasttps.patch(model, kv=kv) as patch:
            for cache in (patch.cache(5), fasttps.StaticKVCache.for_model(model, 5)):
                logits(model, prompt(1, 3), cache=cache)
                assert cache.layers[0].keys.dtype == dtype
            assert type(patch.cache(5)) is fasttps.StaticKVCache
    cache = fasttps.StaticKVCache.for_model(model, 5)
    logits(model, prompt(1, 3), cache=cache)
    assert cache.layers[0].keys.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, "int8"])
def test_dtypes_that_are_not_kept(dtype):
    with pytest.raises(TypeError, match="StaticKVCache: dtype wanted"):
        fasttps.StaticKVCache(tiny_config(), 8, dtype)


def test_a_cache_keeps_its_dtype_over_reset():
    model = tiny_llama()
    cache = cache_of(model, 9, torch.int8)
    for dtype in (torch.float32, torch.bfloat16):
        cache.reset()
        logits(model.to(dtype), prompt(1, 9), cache=cache)
        assert cache.layers[0].keys.dtype == torch.int8
