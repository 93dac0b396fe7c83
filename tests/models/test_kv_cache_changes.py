"""A StaticKVCache that grows, goes to a file and back, or holds sequences of several lengths."""

from __future__ import annotations

import pytest
import torch

import fasttps
from tests.support.errors import bits
from tests.support.families import FAMILIES
from tests.support.llama import generate, logits, prompt

ATOL_F32 = 5e-4
# A full cache, rings, a hybrid.
NAMES = ["llama3.1", "gemma3", "lfm2"]


def patched(name):
    model = FAMILIES[name].model()
    fasttps.patch(model)
    return model


def cache_of(model, room=40, dtype=None, spare=4):
    return fasttps.StaticKVCache(model.config, room, dtype, spare_slots=spare)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_a_cache_grows_and_keeps_its_tokens(name, dtype):
    model, ids = patched(name), prompt(2, 40)
    small, large = cache_of(model, 20, dtype), cache_of(model, 40, dtype)
    logits(model, ids[:, :20], cache=small)
    with pytest.raises(ValueError, match=r"got 20; grow\(max_seq_len\)"):
        logits(model, ids[:, 20:], cache=small)
    small.grow(40)
    logits(model, ids[:, :20], cache=large)
    ours, theirs = (logits(model, ids[:, 20:], cache=cache) for cache in (small, large))
    assert torch.equal(ours, theirs)
    assert small.max_seq_len == small.get_max_length() == 40


def test_a_cache_does_not_shrink():
    cache = cache_of(FAMILIES["llama3.1"].model())
    for wrong, error in ((39, ValueError), (40.5, TypeError)):
        with pytest.raises(error, match="StaticKVCache: max_seq_len wanted"):
            cache.grow(wrong)


def test_an_empty_cache_grows():
    model = patched("gemma3")
    cache = cache_of(model, 5)
    cache.grow(30)
    assert logits(model, prompt(1, 30), cache=cache).shape[1] == 30


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [None, torch.int8, torch.bfloat16])
def test_a_cache_in_a_file(name, dtype, tmp_path):
    """One prompt, several answers."""
    model, ids = patched(name), prompt(2, 30)
    cache = cache_of(model, dtype=dtype)
    logits(model, ids[:, :20], cache=cache)
    cache.save(tmp_path / "prompt.safetensors")
    wanted = logits(model, ids[:, 20:], cache=cache)
    other = cache_of(model, 60, dtype)
    logits(model, prompt(3, 9), cache=other)  # of another batch, and forgotten
    for _ in range(2):
        other.load_from(tmp_path / "prompt.safetensors")
        assert other.get_seq_length() == 20
        assert torch.equal(logits(model, ids[:, 20:], cache=other), wanted)


def test_an_empty_cache_in_a_file(tmp_path):
    model = patched("gemma3")
    cache, other = cache_of(model), cache_of(model)
    cache.save(tmp_path / "empty.safetensors")
    logits(model, prompt(1, 9), cache=other)
    other.load_from(tmp_path / "empty.safetensors")
    assert other.get_seq_length() == 0
    logits(model, prompt(2, 9), cache=other)


@pytest.mark.parametrize("wrong", ["model", "dtype", "room", "spare", "bytes", "rows", "other"])
def test_files_that_do_not_fit_change_nothing(wrong, tmp_path):
    from safetensors.torch import load_file, save_file

    model, path = patched("gemma3"), tmp_path / "cache.safetensors"
    source = patched("llama3.1") if wrong == "model" else model
    cache = cache_of(
        source, dtype=torch.int8 if wrong == "dtype" else None, spare=5 if wrong == "spare" else 4
    )
    logits(source, prompt(2, 20), cache=cache)
    cache.save(path)
    if wrong == "bytes":
        path.write_bytes(path.read_bytes()[:200])
    if wrong == "other":
        save_file({"x": torch.zeros(1)}, path)
    if wrong == "rows":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        del tensors["1.values"]
        save_file(tensors, path, metadata)
    ours = cache_of(model, 19 if wrong == "room" else 40)
    logits(model, prompt(2, 7), cache=ours)
    before = [bits(layer.keys).clone() for layer in ours.layers]
    with pytest.raises(ValueError, match=r"^StaticKVCache: .*(wanted|lacks|is no)"):
        ours.load_from(path)
    assert ours.get_seq_length() == 7
    assert all(torch.equal(bits(x.keys), old) for x, old in zip(ours.layers, before))


@pytest.mark.parametrize("name", ["llama3.1", "gemma3"])
def test_prompts_that_are_padded_on_the_right(name):
    """Each goes on from its own length, as if it were alone."""
    model, lengths = patched(name), torch.tensor([20, 17, 16])
    ids, answers = prompt(3, 20), prompt(3, 6, seed=4)
    cache = cache_of(model)
    logits(model, ids, cache=cache)
    cache.set_seq_lens(lengths)
    assert cache.get_seq_length() == 20 and cache.seq_lens.tolist() == [20, 17, 16]
    rows = []
    for at in range(6):
        positions = (lengths + at)[:, None]
        rows.append(logits(model, answers[:, at : at + 1], cache=cache, position_ids=positions))
    ours = torch.cat(rows, dim=1)
    for row, length in enumerate(lengths.tolist()):
        alone = torch.cat((ids[row, :length], answers[row]))[None]
        theirs = logits(model, alone)[0, length:]
        torch.testing.assert_close(ours[row], theirs, rtol=0, atol=ATOL_F32)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    assert cache.seq_lens.tolist() == [23, 23, 26]
    cache.crop(-2)
    assert cache.seq_lens.tolist() == [23, 23, 24]
    cache.reset()
    assert torch.equal(logits(model, ids, cache=cache), logits(model, ids, cache=cache_of(model)))


def test_lengths_that_are_wrong():
    model = patched("gemma3")
    cache = cache_of(model)
    with pytest.raises(ValueError, match=r"seq_lens wanted int64 \[0\]"):
        cache.set_seq_lens(torch.tensor([1]))
    logits(model, prompt(2, 20), cache=cache)
    for wrong in ([20], [20, 21], [-1, 20], [[20, 20]]):
        with pytest.raises(ValueError, match="StaticKVCache: seq_lens wanted"):
            cache.set_seq_lens(torch.tensor(wrong))
    with pytest.raises(ValueError, match="seq_lens wanted int64"):
        cache.set_seq_lens(torch.tensor([20, 20], dtype=torch.int32))
    with pytest.raises(ValueError, match="wanted the 7 tokens of a sliding layer"):
        cache.set_seq_lens(torch.tensor([20, 14]))
    assert cache.seq_lens.dim() == 0
    cache.set_seq_lens(torch.tensor([20, 16]))
    with pytest.raises(ValueError, match="several tokens wanted sequences of one length"):
        logits(model, prompt(2, 2), cache=cache)
    with pytest.raises(ValueError, match="attention layers only"):
        cache_of(FAMILIES["lfm2"].model()).set_seq_lens(torch.tensor([1]))


@pytest.mark.parametrize("name", NAMES)
def test_the_next_prompt_of_another_batch(name):
    model = patched(name)
    cache = cache_of(model)
    for batch in (2, 1, 3):
        wanted = generate(model, prompt(batch, 9))
        assert torch.equal(generate(model, prompt(batch, 9), cache=cache), wanted)
        cache.reset()


def test_a_hybrid_repeats_and_selects_sequences():
    model, ids = patched("lfm2"), prompt(2, 12)
    cache = cache_of(model)
    logits(model, ids[:, :9], cache=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    ours = logits(model, ids[[1, 0], 9:], cache=cache)
    theirs = logits(model, ids[[1, 0]])[:, 9:]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ATOL_F32)
