"""decode_step with what families beside Llama's have: norms, windows, tables and scales.

Held against the twin in float64, which the models of those families are held against.
"""

from __future__ import annotations

import copy

import pytest
import torch

from fasttps import reference
from tests.support.attention import randn
from tests.support.decoder import Decoder

OP = "decode_step"
LAYERS = 3
WINDOW = 5


def norms_of(decoder, sizes, seed):
    """Weights near 1 for every layer."""
    return [
        1 + 0.2 * randn(seed + at, size, dtype=decoder.dtype)
        for at, size in enumerate(sizes * decoder.layers)
    ]


def out_norms(decoder, arguments):
    return {"out_norms": norms_of(decoder, [decoder.hidden_size] * 2, 70)}


def only_out_norms(decoder, arguments):
    """OLMo 2: what a layer adds is normalised, and not what it takes."""
    final = arguments["norms"][2 * decoder.layers :]
    return {"norms": [None] * (2 * decoder.layers) + final, **out_norms(decoder, arguments)}


def head_norms(decoder, arguments):
    return {"head_norms": norms_of(decoder, [decoder.head_dim] * 2, 80)}


def norms_over_all_heads(decoder, arguments):
    heads = [decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim]
    return {"head_norms": norms_of(decoder, heads, 90)}


def some_norms(decoder, arguments):
    norms = norms_of(decoder, [decoder.head_dim] * 2, 80)
    norms[2:5] = [None] * 3
    out = norms_of(decoder, [decoder.hidden_size] * 2, 70)
    out[1] = out[4] = None
    return {"head_norms": norms, "out_norms": out}


def two_tables(decoder, arguments):
    """Gemma 3: sliding layers have angles of their own."""
    tables = [torch.stack((x, 0.3 * x)) for x in (arguments["cos"], arguments["sin"])]
    return {"cos": tables[0], "sin": tables[1], "ropes": [1, 0, 1]}


def no_rope(decoder, arguments):
    return {"ropes": [0, -1, 0]}


def reordered(decoder, arguments):
    """q, k and v share an order, o has one, and gate and up have that of q in one layer."""
    generator = torch.Generator().manual_seed(5)
    sizes = (decoder.hidden_size, decoder.num_heads * decoder.head_dim)
    orders = [torch.randperm(size, generator=generator) for size in sizes]
    columns = [0, 0, 0, 1, 0, -1, 0, -1, 0, -1, -1, -1, -1, -1, -1, 1, 0, -1]
    return {"orders": orders, "columns": columns}


def gemma(decoder, arguments):
    return {
        **out_norms(decoder, arguments),
        **head_norms(decoder, arguments),
        **two_tables(decoder, arguments),
        "norm_offset": 1.0,
        "softcap": 3.0,
        "logits_softcap": 20.0,
        "embedding_scale": 6.0,
        "windows": [WINDOW, 0, WINDOW],
        "scale": 0.3,
    }


VARIANTS = {
    "out norms": out_norms,
    "only out norms": only_out_norms,
    "head norms": head_norms,
    "norms over all heads": norms_over_all_heads,
    "some norms": some_norms,
    "norm_offset": lambda decoder, arguments: {"norm_offset": 1.0},
    "windows": lambda decoder, arguments: {"windows": [WINDOW, 0, 2]},
    "softcap": lambda decoder, arguments: {"softcap": 1.5},
    "residual_scale": lambda decoder, arguments: {"residual_scale": 0.3},
    "scales": lambda decoder, arguments: {"embedding_scale": 4.0, "logits_scale": 0.2},
    "logits_softcap": lambda decoder, arguments: {"logits_softcap": 7.0, "logits_scale": 2.0},
    "two tables": two_tables,
    "no rope": no_rope,
    "reordered columns": reordered,
    "gemma": gemma,
}


def token_ids(batch, new_tokens, decoder):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(decoder.vocab_size, (batch, new_tokens), generator=generator)


def check(device, decoder, arguments):
    """Within float32's roundings of what goes through three layers; and the likeliest tokens."""
    exact = reference.decode_step(**copy.deepcopy(arguments)).double()
    out = device.call(OP, **device.arguments(copy.deepcopy(arguments))).double().cpu()
    # A 16-bit cache rounds keys and values, which a float64 sum may round the other way.
    bound = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[decoder.dtype]
    assert float((out - exact).norm() / exact.norm()) < bound
    if "lm_head" in arguments:
        first = device.call(OP, **device.arguments(copy.deepcopy(arguments)), argmax=True)
        assert torch.equal(first.cpu(), out.argmax(-1))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_variants(device, name, dtype):
    decoder = Decoder(dtype=dtype, layers=LAYERS)
    for past, new_tokens in (([9, 3], 2), ([0, 0], 1)):
        arguments = decoder.arguments(token_ids(2, new_tokens, decoder), past, ends=True)
        arguments |= VARIANTS[name](decoder, arguments)
        check(device, decoder, arguments)


@pytest.mark.parametrize("name", ["out norms", "only out norms", "residual_scale"])
def test_hidden_states(device, name):
    """Without ends, x itself is the result, of which each thread has a part."""
    decoder = Decoder(layers=LAYERS, hidden_size=257, intermediate_size=300)
    for batch in (1, 3):
        x = randn(1, batch, 2, decoder.hidden_size)
        arguments = decoder.arguments(x, 7)
        arguments |= VARIANTS[name](decoder, arguments)
        check(device, decoder, arguments)


@pytest.mark.parametrize("name", ["gemma", "norms over all heads"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(device, name, threads):
    decoder = Decoder(layers=LAYERS, hidden_size=512, intermediate_size=256, max_seq_len=200)
    arguments = decoder.arguments(token_ids(2, 2, decoder), [190, 60], ends=True)
    arguments |= VARIANTS[name](decoder, arguments)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(device, decoder, arguments)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("int8_cache", [False, True])
@pytest.mark.parametrize("past", [0, 4, 6, 7, 8, 9, 100, 2**40])
def test_rings(device, past, int8_cache):
    """A ring of eight slots says what the last eight rows of a whole cache say."""
    slots, window, new_tokens = 8, 6, 2
    decoder = Decoder(layers=2, max_seq_len=slots, int8_cache=int8_cache)
    arguments = decoder.arguments(token_ids(1, new_tokens, decoder), 0, ends=True)
    arguments |= {"windows": [window], "ring": True, "seq_lens": torch.tensor(past)}
    whole = copy.deepcopy(arguments)
    # Position p of the ring is row p - first of the whole cache.
    end = past + new_tokens
    first = max(0, end - slots)
    order = torch.arange(first, first + slots) % slots
    for key in ("k_caches", "v_caches", "k_scales", "v_scales"):
        if key in whole:
            whole[key] = [x.index_select(2, order) for x in whole[key]]
    whole |= {"ring": False, "seq_lens": torch.tensor(past - first)}
    ours = device.call(OP, **device.arguments(arguments))
    theirs = device.call(OP, **device.arguments(whole))
    # Other blocks of keys; with int8 ones, rounded queries.
    atol = 1e-4 if int8_cache else 1e-5
    torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=atol)


def test_layers_of_several_lengths(device):
    """A full cache beside rings."""
    decoder = Decoder(layers=LAYERS, max_seq_len=24)
    arguments = decoder.arguments(token_ids(2, 1, decoder), [20, 11], ends=True)
    for name in ("k_caches", "v_caches"):
        caches = arguments[name]
        for at in (0, 2):
            caches[at] = caches[at][:, :, :8].contiguous()
    arguments |= {"windows": [WINDOW, 0, WINDOW], "ring": True}
    check(device, decoder, arguments)
