"""A layer of each model in table 1 of FastTPS, in its own size: attention, MLP and a token."""

from __future__ import annotations

import importlib

import pytest
import torch

import fasttps
from tests.support.llama import cache_name

# Query heads, KV heads, head dim, MLP width, and hidden size. Table 1
# gives Llama 3.2 the 32 KV heads to which the paper expands its 8.
SHAPES = {
    "llama3": ("llama", "Llama", 32, 8, 128, 14336, 4096),
    "glm": ("glm", "Glm", 32, 2, 128, 13696, 4096),
    "llama2": ("llama", "Llama", 32, 32, 128, 11008, 4096),
    "phi3": ("phi3", "Phi3", 32, 32, 96, 8192, 3072),
    "llama3.2": ("llama", "Llama", 32, 32, 64, 8192, 2048),
}


def layer_of(name):
    module, kind, heads, kv_heads, head_dim, width, hidden = SHAPES[name]
    configs = importlib.import_module(f"transformers.models.{module}")
    config = getattr(configs, f"{kind}Config")(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=63,
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = getattr(configs, f"{kind}ForCausalLM")(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        scale = 1.0 if parameter.dim() < 2 else parameter.size(1) ** -0.5
        parameter.data = torch.empty(parameter.shape, dtype=torch.bfloat16)
        # Uniform numbers are drawn ten times sooner than normal ones.
        parameter.data.uniform_(-1.7 * scale, 1.7 * scale, generator=generator)
        if parameter.dim() < 2:
            parameter.data.fill_(1.0)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.slow
@torch.no_grad()
def test_shape(name):
    """As near to float32's answer as the unpatched model in bfloat16, prompt and token."""
    model = layer_of(name)
    ids = torch.randint(1, 63, (1, 40), generator=torch.Generator().manual_seed(1))
    theirs = model(ids).logits.double()
    patch = fasttps.patch(model)
    cache = patch.cache(64)
    prompt = model(ids[:, :-1], **{cache_name(model): cache}).logits.double()
    token = model(ids[:, -1:], **{cache_name(model): cache}).logits.double()
    assert getattr(model, "why_not", "no such op") is None
    ours = torch.cat((prompt, token), dim=1)
    patch.undo()
    exact = model.float()(ids).logits.double()
    for part in (slice(0, -1), slice(-1, None)):
        off, their_off = (
            (x[:, part] - exact[:, part]).norm() / exact[:, part].norm() for x in (ours, theirs)
        )
        assert off <= 1.2 * their_off, f"{off:.2e} against {their_off:.2e}"
