"""One greedy run of every family. This file runs on every release of transformers.

test_transformers_releases.py starts it on the older ones.
"""

from __future__ import annotations

import pytest
import torch

import fasttps
from tests.support.families import FAMILIES, each_family
from tests.support.llama import generate, left_padded, prompt


@each_family
def test_greedy_tokens_of_a_padded_batch(family):
    """Past the window of sliding layers, with transformers' cache and with ours; then undone."""
    model = family.model()
    inputs = left_padded(prompt(2, 12), [0, 4])
    theirs = generate(model, inputs)
    patch = fasttps.patch(model)
    assert torch.equal(generate(model, inputs), theirs)
    assert torch.equal(generate(model, inputs, cache=cache_of(patch, family)), theirs)
    patch.undo()
    assert torch.equal(generate(model, inputs), theirs)


def cache_of(patch, family):
    """Ours; the state of conv layers has a cache in newer releases alone."""
    if family is FAMILIES["lfm2"] and not has_conv_caches():
        with pytest.raises(ValueError, match="conv"):
            patch.cache(40)
        return None
    return patch.cache(40)


def has_conv_caches():
    from transformers import cache_utils

    return "conv" in getattr(cache_utils, "STATIC_LAYER_TYPE_MAPPING", {})
