"""torch.export of a patched model: it says what the eager one says, or is refused."""

from __future__ import annotations

import io

import pytest
import torch

import fasttps
from tests.support.llama import cache_name, logits, prompt, tiny_llama

ATOL_F32 = 2e-4


def reloaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def op_names(program):
    return {str(node.target) for node in program.graph.nodes if "fasttps" in str(node.target)}


@pytest.fixture
def patched():
    model = tiny_llama()
    theirs = logits(model, prompt(1, 9))
    with fasttps.patch(model), torch.no_grad():
        yield model, theirs


def test_prefill_without_a_cache(patched):
    model, theirs = patched
    program = torch.export.export(model, (prompt(1, 9),), {"use_cache": False}, strict=False)
    assert op_names(program) == {
        "fasttps.causal_prefill.default",
        "fasttps.gate_up_silu_mlp.default",
        "fasttps.packed_linear.default",
    }
    ours = reloaded(program)(prompt(1, 9), use_cache=False).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ATOL_F32)


MASKS = {
    "none": None,
    "padding": torch.tensor([[0] + [1] * 8]),
    "additive": torch.full((1, 1, 9, 9), -torch.inf).triu(1),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("static", [False, True])
def test_tensors_without_values(patched, mask, static):
    """A fake mask has a shape and no values: it cannot be asked how far it sees."""
    from torch._subclasses import FakeTensorMode

    model, theirs = patched
    options = {cache_name(model): fasttps.StaticKVCache(model.config, 12)} if static else {}
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        if MASKS[mask] is not None:
            options["attention_mask"] = fake.from_tensor(MASKS[mask])
        ours = model(fake.from_tensor(prompt(1, 9)), use_cache=static, **options).logits
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_decode_with_a_static_cache_that_is_half_filled(patched):
    """Elsewhere the exported program ignored what was in the cache."""
    from transformers import GenerationConfig
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    model, theirs = patched
    model.generation_config = GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        cache_config={"batch_size": 1, "max_cache_len": 12},
    )
    wrapped = TorchExportableModuleForDecoderOnlyLM(model)
    for at in range(5):
        step = {"input_ids": prompt(1, 9)[:, at : at + 1], "cache_position": torch.tensor([at])}
        wrapped.model(**step)
    program = wrapped.export(input_ids=prompt(1, 9)[:, 5:6], cache_position=torch.tensor([5]))
    assert "fasttps.rope_attention_decode.default" in op_names(program)
    module = reloaded(program)
    outs = [
        module(input_ids=prompt(1, 9)[:, at : at + 1], cache_position=torch.tensor([at]))
        for at in range(5, 9)
    ]
    torch.testing.assert_close(torch.cat(outs, dim=1), theirs[:, 5:], rtol=0, atol=ATOL_F32)


def test_a_static_kv_cache_is_refused(patched):
    """Its length is a Python number, which a graph would freeze."""
    model, _ = patched
    cache = fasttps.StaticKVCache(model.config, 12)
    with pytest.raises(ValueError, match="StaticKVCache"):
        torch.export.export(model, (prompt(1, 9),), {cache_name(model): cache}, strict=False)
