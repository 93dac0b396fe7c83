"""A patched model's next tokens as one op: the same results, and when it stands back."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

import fasttps
from tests.support.llama import cache_name, generate, left_padded, logits, prompt, tiny_llama


@pytest.fixture(scope="module")
def pair():
    """Two patched models of the same weights: a token as one op, and module by module."""
    one, other = tiny_llama(), tiny_llama()
    fasttps.patch(one)
    fasttps.patch(other, decode_step=False)
    return one, other


def filled(model, ids, **options):
    """A cache that holds the prompts `ids`."""
    cache = fasttps.StaticKVCache(model.config, 64, **options)
    logits(model, ids, cache=cache)
    return cache


@torch.no_grad()
def next_logits(model, ids, cache, **options):
    before = cache.get_seq_length()
    out = logits(model, ids, cache=cache, **options)
    assert cache.get_seq_length() == before + ids.size(1)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("batch, new_tokens", [(1, 1), (3, 1), (2, 5)])
def test_same_logits_as_module_by_module(dtype, tied, batch, new_tokens):
    """The one op rounds less, so it is as near to float64 as the modules are, or nearer."""
    ids = prompt(batch, 9 + new_tokens)
    exact = logits(tiny_llama(tie_word_embeddings=tied, dtype=dtype).double(), ids)[:, 9:]
    errors = []
    for decode_step in (True, False):
        model = tiny_llama(tie_word_embeddings=tied, dtype=dtype)
        with fasttps.patch(model, decode_step=decode_step):
            out = next_logits(model, ids[:, 9:], filled(model, ids[:, :9]))
            assert out.dtype == dtype and out.shape == exact.shape
            if decode_step:
                assert model.why_not is None
            errors.append(float((out.double() - exact).abs().max()))
    floor = float(exact.abs().max()) * torch.finfo(dtype).eps
    assert errors[0] <= 1.5 * errors[1] + floor


def test_greedy_tokens_are_those_of_the_unpatched_model():
    ids = prompt(2, 9)
    model = tiny_llama()
    expected = generate(model, ids)
    with fasttps.patch(model) as patch:
        assert torch.equal(generate(model, ids, cache=patch.cache(40)), expected)
        assert model.why_not is None
        ours = fasttps.generate(model, ids, max_new_tokens=12, stop_token_ids=())
        assert ours.token_ids == expected[:, 9:].tolist()


def test_left_padding(pair):
    one = pair[0]
    inputs = left_padded(prompt(3, 9), [0, 4, 2])
    options = {"num_beams": 1}
    ours, theirs = (
        generate(model, inputs, cache=fasttps.StaticKVCache(model.config, 40), **options)
        for model in pair
    )
    assert one.why_not is None
    assert torch.equal(ours, theirs)
    loop = fasttps.generate(one, **inputs, max_new_tokens=12, stop_token_ids=())
    assert loop.token_ids == theirs[:, 9:].tolist()


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "drafts"]
)
def test_beams_and_drafts(pair, options):
    ids = prompt(1, 9)
    ours, theirs = (
        generate(model, ids, cache=fasttps.StaticKVCache(model.config, 64), **options)
        for model in pair
    )
    assert pair[0].why_not is None
    assert torch.equal(ours, theirs)


def test_int8_cache(pair):
    ids = prompt(2, 10)
    ours, theirs = (
        next_logits(model, ids[:, 9:], filled(model, ids[:, :9], dtype=torch.int8))
        for model in pair
    )
    assert pair[0].why_not is None
    # One step of an int8 row is 1/254 of its largest element; a rounding may fall either way.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * float(theirs.abs().max()))


def test_a_dropped_cache_frees_its_memory(pair):
    ids = prompt(1, 10)
    cache = filled(pair[0], ids[:, :9])
    next_logits(pair[0], ids[:, 9:], cache)
    assert pair[0].why_not is None
    cache, keys = weakref.ref(cache), weakref.ref(cache.layers[0].keys)
    gc.collect()
    assert cache() is None and keys() is None


def test_a_cache_whose_tensors_were_replaced(pair):
    """As transformers does when it reorders or repeats the sequences of a cache."""
    ids = prompt(1, 11)
    wanted = logits(pair[1], ids)[:, 9:]
    cache = filled(pair[0], ids[:, :9])
    first = next_logits(pair[0], ids[:, 9:10], cache)
    for layer in cache.layers:
        layer.keys = layer.keys.clone()
        layer.values = layer.values.clone()
    second = next_logits(pair[0], ids[:, 10:], cache)
    assert pair[0].why_not is None
    torch.testing.assert_close(torch.cat([first, second], 1), wanted)


def test_a_cropped_cache(pair):
    ids = prompt(1, 12)
    one, other = pair
    cache = filled(one, ids[:, :9])
    next_logits(one, ids[:, 3:6], cache)
    cache.crop(-3)
    ours = next_logits(one, ids[:, 9:], cache)
    torch.testing.assert_close(ours, next_logits(other, ids[:, 9:], filled(other, ids[:, :9])))


def test_given_positions_count(pair):
    ids = prompt(2, 11)
    for positions in (torch.tensor([[40, 41]]), torch.tensor([[40, 41], [3, 9]])):
        ours, theirs = (
            next_logits(model, ids[:, 9:], filled(model, ids[:, :9]), position_ids=positions)
            for model in pair
        )
        assert pair[0].why_not is None
        torch.testing.assert_close(ours, theirs)


# What is asked for -> part of why the modules run.
FALLS_BACK = {
    "many_tokens": (lambda m, c: {"input_ids": prompt(2, 9)}, "9 new tokens"),
    "embeddings": (
        lambda m, c: {
            "input_ids": None,
            "inputs_embeds": torch.ones(2, 1, m.config.hidden_size),
        },
        "inputs_embeds",
    ),
    "hidden_states": (lambda m, c: {"output_hidden_states": True}, "output_hidden_states"),
    "tuple": (lambda m, c: {"return_dict": False}, "return_dict"),
    "a_mask_with_a_hole": (
        lambda m, c: {"attention_mask": torch.tensor([[1] * 4 + [0] + [1] * 5] * 2)},
        "mask with holes",
    ),
    "a_mask_of_four_dimensions": (
        lambda m, c: {"attention_mask": torch.zeros(2, 1, 1, 10)},
        "mask that is not",
    ),
    "labels": (lambda m, c: {"labels": prompt(2, 1)}, "labels"),
    "logits_of_some": (lambda m, c: {"logits_to_keep": torch.tensor([0])}, "logits_to_keep"),
}


@pytest.mark.parametrize("case", FALLS_BACK)
def test_goes_module_by_module_where_the_op_does_not_serve(pair, case):
    make, why = FALLS_BACK[case]
    outputs = []
    for model in pair:
        cache = filled(model, prompt(2, 9))
        options = {"input_ids": prompt(2, 1, seed=5), **make(model, cache)}
        with torch.no_grad():
            out = model(**options, **{cache_name(model): cache})
        outputs.append(out[0] if isinstance(out, tuple) else out.logits)
    assert why in pair[0].why_not
    assert torch.equal(*outputs)


def test_hooks_inside_the_model_fire(pair):
    model = pair[0]
    seen = []
    handle = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    try:
        next_logits(model, prompt(1, 1), filled(model, prompt(1, 9)))
    finally:
        handle.remove()
    assert len(seen) == 2  # the prompt and the token
    assert "hooks" in model.why_not
    next_logits(model, prompt(1, 1), filled(model, prompt(1, 9)))
    assert model.why_not is None and len(seen) == 2


def test_new_weights_count():
    """The op's arguments were gathered before: what replaces them must not be missed."""
    ids = prompt(1, 10)
    model, other = tiny_llama(), tiny_llama(1)
    with fasttps.patch(model):
        next_logits(model, ids[:, 9:], filled(model, ids[:, :9]))
        model.load_state_dict(other.state_dict())
        with fasttps.patch(other):
            expected = next_logits(other, ids[:, 9:], filled(other, ids[:, :9]))
            ours = next_logits(model, ids[:, 9:], filled(model, ids[:, :9]))
            assert model.why_not is None
            assert torch.equal(ours, expected)
            size = model.config.hidden_size
            for m in (model, other):
                m.model.layers[1].input_layernorm.weight = torch.nn.Parameter(torch.ones(size) / 2)
            changed = next_logits(other, ids[:, 9:], filled(other, ids[:, :9]))
            assert not torch.equal(changed, expected)
            assert torch.equal(next_logits(model, ids[:, 9:], filled(model, ids[:, :9])), changed)
            assert model.why_not is None


def test_frequencies_changed_in_place_count(pair):
    """The table of angles outlives a token, and must not outlive what it was made of."""
    ids = prompt(1, 10)
    outs = []
    for model in pair:
        cache = filled(model, ids[:, :9])
        next_logits(model, ids[:, 9:], cache)
        cache.crop(-1)
        frequencies = model.model.rotary_emb.inv_freq
        before = frequencies.clone()
        frequencies.mul_(0.5)
        outs.append(next_logits(model, ids[:, 9:], cache))
        frequencies.copy_(before)
    assert pair[0].why_not is None
    torch.testing.assert_close(*outs)


def test_a_replaced_layer_runs():
    model = tiny_llama()
    ids = prompt(1, 10)
    with fasttps.patch(model):
        next_logits(model, ids[:, 9:], filled(model, ids[:, :9]))

        class Doubled(torch.nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer

            def forward(self, *args, **kwargs):
                return 2 * self.layer(*args, **kwargs)

        plain = next_logits(model, ids[:, 9:], filled(model, ids[:, :9]))
        layer = model.model.layers[2]
        model.model.layers[2] = Doubled(layer)
        doubled = next_logits(model, ids[:, 9:], filled(model, ids[:, :9]))
        assert "Doubled" in model.why_not
        assert not torch.equal(doubled, plain)
        model.model.layers[2] = layer


@pytest.mark.parametrize("kind", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_its_own_plan(kind):
    model = tiny_llama()
    ids = prompt(1, 10)
    with fasttps.patch(model):
        ours = next_logits(model, ids[:, 9:], filled(model, ids[:, :9]))
        other = kind(model)
        other.load_state_dict({key: 0 * value for key, value in other.state_dict().items()})
        zeros = next_logits(other, ids[:, 9:], filled(other, ids[:, :9]))
        assert other.why_not is None
        assert torch.equal(zeros, torch.zeros_like(zeros))
        assert torch.equal(next_logits(model, ids[:, 9:], filled(model, ids[:, :9])), ours)


def test_a_saved_model_has_the_architecture_that_it_had(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    theirs = logits(model, prompt(1, 9))
    with fasttps.patch(model):
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(logits(loaded.eval(), prompt(1, 9)), theirs)


def test_a_full_cache_is_the_same_error():
    model = tiny_llama()
    with fasttps.patch(model):
        cache = fasttps.StaticKVCache(model.config, 9)
        logits(model, prompt(1, 9), cache=cache)
        with pytest.raises(ValueError, match="max_seq_len wanted at least 10"):
            logits(model, prompt(1, 1), cache=cache)
        assert cache.get_seq_length() == 9
