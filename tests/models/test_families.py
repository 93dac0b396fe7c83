"""Every family, patched, says what it says unpatched; float32, greedy, token for token."""

from __future__ import annotations

import pytest
import torch

import fasttps
from tests.support.families import each_family
from tests.support.llama import generate, left_padded, prompt

NEW_TOKENS = 48
OPTIONS = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}


@each_family
def test_report(family):
    patch = fasttps.patch(family.model())
    report = patch.report()
    print(report)
    assert len(report.fused) == family.fused
    assert len(report.skipped) == family.left


@each_family
@pytest.mark.parametrize("spare", [0, 3, 255])
def test_tokens(family, spare):
    plain, patched = family.model(), family.model()
    fasttps.patch(patched)
    for inputs in (prompt(1, 20), left_padded(prompt(3, 13), [0, 4, 11])):
        wanted = generate(plain, inputs, **OPTIONS)
        assert torch.equal(generate(patched, inputs, **OPTIONS), wanted)
        cache = fasttps.StaticKVCache(patched.config, 80, spare_slots=spare)
        assert torch.equal(generate(patched, inputs, cache=cache, **OPTIONS), wanted)
