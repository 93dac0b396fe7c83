"""A copy of a patched model computes with its own weights, however it was made."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch

import fasttps
from tests.support.command import process_environment
from tests.support.llama import FUSED_MODULES, generate, logits, prompt, tiny_llama


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_follows_its_own_weights(kind):
    """The copy's forward stayed bound to the original elsewhere: zeroed, it must say zero."""
    model = tiny_llama()
    with fasttps.patch(model):
        ours = logits(model, prompt(2, 9))
        other = COPIES[kind](model)
        assert type(other.model.layers[0].mlp) is type(model.model.layers[0].mlp)
        assert torch.equal(logits(other, prompt(2, 9)), ours)
        other.load_state_dict({key: 0 * value for key, value in other.state_dict().items()})
        assert torch.equal(logits(other, prompt(2, 9)), torch.zeros_like(ours))
        assert torch.equal(logits(model, prompt(2, 9)), ours)
    assert torch.equal(logits(other, prompt(2, 9)), torch.zeros_like(ours))


@pytest.mark.parametrize("kind", COPIES)
def test_packed_weights_are_copied(kind):
    model = tiny_llama()
    with fasttps.patch(model):
        ours = logits(model, prompt(2, 9))
        other = COPIES[kind](model)
        for layer in other.model.layers:
            layer.mlp.gate_up_packed.zero_()
        assert not torch.equal(logits(other, prompt(2, 9)), ours)
        assert torch.equal(logits(model, prompt(2, 9)), ours)


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_that_has_no_patch_to_undo_says_the_way_out(kind):
    model, fresh = tiny_llama(), tiny_llama(1)
    theirs = logits(model, prompt(2, 9))
    with fasttps.patch(model):
        other = COPIES[kind](model)
    with pytest.raises(fasttps.PatchError, match=r"load its state_dict\(\) into a fresh model"):
        fasttps.patch(other)
    fresh.load_state_dict(other.state_dict())
    assert torch.equal(logits(fresh, prompt(2, 9)), theirs)


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_after_undo_is_unpatched(kind):
    model = tiny_llama()
    theirs = logits(model, prompt(2, 9))
    fasttps.patch(model).undo()
    other = COPIES[kind](model)
    assert torch.equal(logits(other, prompt(2, 9)), theirs)
    with fasttps.patch(other) as patch:
        assert len(patch.report().fused) == FUSED_MODULES


def test_a_pickle_opens_in_a_process_that_has_not_patched(tmp_path):
    model = tiny_llama()
    with fasttps.patch(model):
        ours = generate(model, prompt(1, 5))
        torch.save(model, tmp_path / "model.pt")
    script = f"""
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
print(model.generate(torch.tensor({prompt(1, 5).tolist()}), attention_mask=torch.ones(1, 5),
                     max_new_tokens=12, min_new_tokens=12, do_sample=False).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=process_environment(),
    )
    assert done.stdout.strip() == str(ours.tolist()), done.stderr


def test_a_copied_cache_goes_its_own_way():
    """One prompt, several answers: the cache is copied after the prompt."""
    model = tiny_llama()
    with fasttps.patch(model):
        cache = fasttps.StaticKVCache(model.config, 32)
        logits(model, prompt(1, 8), cache=cache)
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        turn = torch.cat([prompt(1, 8), prompt(1, 3, seed=4)], dim=1)
        ours = generate(model, turn, cache=cache)
        assert cache.get_seq_length() == 22
        for other in copies:
            assert other.get_seq_length() == 8
            assert torch.equal(generate(model, turn, cache=other), ours)
