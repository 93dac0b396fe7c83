"""Models of no family that is known: their attention becomes ours where they ask for one."""

from __future__ import annotations

import pytest
import torch

import fasttps
from tests.support.llama import EOS, VOCAB, generate, left_padded, prompt, scale_weights


def cohere(seed=0):
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
    )
    return scale_weights(CohereForCausalLM(config), seed)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_model_that_asks_for_an_attention_gets_ours(cache):
    plain, model = cohere(), cohere()
    inputs = left_padded(prompt(2, 9), [0, 4])
    wanted = generate(plain, inputs)
    before = model.config._attn_implementation
    with fasttps.patch(model) as patch:
        report = patch.report()
        assert len(report.fused) == 3 and not report.skipped
        assert "self_attn (CohereAttention) -> transformers' attention interface" in str(report)
        room = {"cache": fasttps.StaticKVCache(model.config, 21)} if cache == "static" else {}
        assert torch.equal(generate(model, inputs, **room), wanted)
        assert model.config._attn_implementation == "fasttps"
    assert model.config._attn_implementation == before
    assert torch.equal(generate(model, inputs), wanted)


def test_without_the_attention_nothing_is_left():
    with pytest.raises(fasttps.PatchError, match="CohereForCausalLM has no module"):
        fasttps.patch(cohere(), attention=False)


def test_weights_that_were_asked_for():
    """No linear of an unknown class is packed."""
    with pytest.raises(fasttps.PatchError, match="weights='int8' cannot be had"):
        fasttps.patch(cohere(), weights="int8")
