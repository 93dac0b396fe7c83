"""`attn_implementation="fasttps"` in models that are not patched, against transformers' eager."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fasttps
from fasttps.models.attention_interface import fasttps_attention_forward
from tests.support.command import process_environment
from tests.support.llama import (
    EOS,
    VOCAB,
    generate,
    left_padded,
    logits,
    prompt,
    scale_weights,
)

ATOL_F32 = 2e-4  # two orders of adding up float32 products, three layers
WINDOW = 6

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "Qwen3": {"head_dim": 20},
    "Gemma2": {
        "head_dim": 12,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 7,
    },
    "GptOss": {
        "head_dim": 12,
        "sliding_window": WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


def model_of(family, implementation):
    import transformers

    fasttps.register_attention()
    config = getattr(transformers, f"{family}Config")(**COMMON | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    )
    assert model.config._attn_implementation == implementation
    return scale_weights(model)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    return model_of(request.param, "eager"), model_of(request.param, "fasttps")


# Below, at and past the window, so that a window off by one either way shows.
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 17])
def test_prefill(pair, length):
    eager, ours = pair
    ids = prompt(2, length)
    torch.testing.assert_close(logits(ours, ids), logits(eager, ids), rtol=0, atol=ATOL_F32)


@pytest.mark.parametrize("kind", ["dynamic", "hf_static", "static_kv_cache"])
@pytest.mark.parametrize("padding", [[0, 0], [0, 4]])
def test_greedy(pair, kind, padding):
    eager, ours = pair
    inputs = left_padded(prompt(2, 9), padding)
    options = {"cache_implementation": "static"} if kind == "hf_static" else {}
    if kind == "static_kv_cache":
        options = {"cache": fasttps.StaticKVCache(ours.config, 21)}
    assert torch.equal(generate(ours, inputs, **options), generate(eager, inputs))


def test_weights_of_the_attention(pair):
    """`output_attentions` gives what eager gives, never nothing or something else."""
    eager, ours = pair
    with torch.no_grad():
        theirs = eager(prompt(2, 9), output_attentions=True).attentions
        weights = ours(prompt(2, 9), output_attentions=True).attentions
    assert len(weights) == len(theirs) == COMMON["num_hidden_layers"]
    for mine, other in zip(weights, theirs):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def attend(query, key, value, mask=None, *, is_causal=True, **options):
    """Our function called as a model calls it."""
    module = SimpleNamespace(is_causal=is_causal)
    with torch.no_grad():
        return fasttps_attention_forward(module, query, key, value, mask, **options)[0]


def uniform(new_tokens, kv_len, heads=2, head_dim=8):
    """A query of zeros and values that count up: out is the mean of the visible positions."""
    value = torch.arange(float(kv_len)).view(1, 1, -1, 1).expand(1, 1, kv_len, head_dim)
    return torch.zeros(1, heads, new_tokens, head_dim), torch.randn(1, 1, kv_len, head_dim), value


def means(out):
    return out[0, :, 0, 0].tolist()


def test_no_mask_one_query_sees_all_keys():
    assert means(attend(*uniform(1, 8))) == [3.5]


def test_no_mask_several_queries_are_causal_from_the_first_key():
    """Also where a static cache gives more slots than there are tokens, and never written ones."""
    query, key, value = uniform(3, 8)
    key, value = key.clone(), value.clone()
    key[:, :, 3:], value[:, :, 3:] = torch.nan, torch.nan
    assert means(attend(query, key, value)) == [0.0, 0.5, 1.0]


def test_no_mask_more_queries_than_keys():
    assert means(attend(*uniform(4, 2))) == [0.0, 0.5, 0.5, 0.5]


def test_window_of_4_decodes_token_7_from_keys_4_to_7():
    """Off by one elsewhere: 5 keys give 5.0, 3 keys give 6.0."""
    assert means(attend(*uniform(1, 8), sliding_window=4)) == [5.5]
    assert means(attend(*uniform(8, 8), sliding_window=4)) == [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]


@pytest.mark.parametrize("kv_len", [3, 4, 5])
def test_window_around_the_length(kv_len):
    first = max(0, kv_len - 4)
    expected = sum(range(first, kv_len)) / (kv_len - first)
    assert means(attend(*uniform(1, kv_len), sliding_window=4)) == [expected]


def test_not_causal_by_argument_or_module():
    """The argument goes before the module's own."""
    assert means(attend(*uniform(2, 4), is_causal=False)) == [1.5, 1.5]
    out = fasttps_attention_forward(
        SimpleNamespace(is_causal=True), *uniform(2, 4), None, is_causal=False
    )[0]
    assert means(out) == [1.5, 1.5]
    out = fasttps_attention_forward(
        SimpleNamespace(is_causal=False), *uniform(2, 4), None, is_causal=True
    )[0]
    assert means(out) == [0.0, 0.5]


def test_a_bidirectional_window_is_never_full_attention():
    """Dropped in silence elsewhere."""
    with pytest.raises(ValueError, match="bidirectional sliding window"):
        attend(*uniform(4, 8), is_causal=False, sliding_window=3)
    assert means(attend(*uniform(2, 3), is_causal=False, sliding_window=3)) == [1.0, 1.0]


def test_a_mask_alone_decides():
    """It may look ahead of the diagonal, as a prefix or a tree of drafts does."""
    mask = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])
    out = attend(*uniform(3, 3), mask[None, None], sliding_window=1)
    assert means(out) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", ["min", "inf", "twice min"])
def test_additive_masks(dtype, low):
    lowest = torch.finfo(dtype).min
    blocked = {"min": lowest, "inf": -torch.inf, "twice min": lowest + lowest}[low]
    mask = torch.tensor([[0.0, blocked, 0.0], [-0.0, 0.0, blocked]], dtype=dtype)[None, None]
    out = attend(*(x.to(dtype) for x in uniform(2, 3)), mask)
    assert means(out) == [1.0, 0.5]


@pytest.mark.parametrize("value", [-1.0, 0.5, -1e4, torch.nan])
def test_an_additive_bias_is_refused(value):
    mask = torch.tensor([[0.0, value]])[None, None]
    with pytest.raises(ValueError, match="additive attention_mask may hold 0 and -inf only"):
        attend(*uniform(1, 2), mask)


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (torch.ones(1, 1, 1, 4, dtype=torch.int64), TypeError),
        (torch.ones(1, 4, dtype=torch.bool), ValueError),
        (torch.ones(1, 1, 3, 4, dtype=torch.bool), ValueError),
        ([[True]], TypeError),
    ],
)
def test_masks_of_another_kind_are_refused(mask, error):
    with pytest.raises(error, match="attention_mask wanted"):
        attend(*uniform(2, 4), mask)


def test_dropout_and_position_bias_are_refused():
    with pytest.raises(ValueError, match="dropout wanted 0"):
        attend(*uniform(2, 4), dropout=0.1)
    with pytest.raises(ValueError, match="position_bias"):
        attend(*uniform(2, 4), position_bias=torch.zeros(1, 2, 2, 4))


@pytest.mark.parametrize("value_dim", [4, 12])
def test_values_narrower_or_wider_than_keys(value_dim):
    """As multi-head latent attention has them."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 4, 5, 8, generator=generator).unbind()
    value = torch.randn(2, 4, 5, value_dim, generator=generator)
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    ours = attend(query, key, value)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=0, atol=1e-6)


def test_keys_of_any_strides():
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 5, 4, 8, generator=generator).unbind()
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    ours = attend(query, key, value)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=0, atol=1e-6)
    turned = key.mT.contiguous().mT  # the last dimension is not dense
    torch.testing.assert_close(attend(query, turned, value), ours, rtol=0, atol=0)


def test_registering_twice_changes_nothing():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for _ in range(2):
        fasttps.register_attention()
    assert ALL_ATTENTION_FUNCTIONS["fasttps"] is fasttps_attention_forward
    assert ALL_MASK_ATTENTION_FUNCTIONS["fasttps"] is ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


IMPORTS = {
    "fasttps first": """
import sys
import fasttps
assert "transformers" not in sys.modules
from transformers import AutoModelForCausalLM, LlamaConfig""",
    "transformers first": """
from transformers import AutoModelForCausalLM, LlamaConfig
import fasttps""",
    "models first": """
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
import fasttps""",
}


@pytest.mark.parametrize("order", IMPORTS)
def test_it_registers_without_importing_transformers(order):
    script = f"""{IMPORTS[order]}
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                     num_attention_heads=2)
model = AutoModelForCausalLM.from_config(config, attn_implementation="fasttps")
import transformers.modeling_utils as modeling
assert type(modeling.__loader__).__name__ == "SourceFileLoader"
assert modeling.__spec__.loader is modeling.__loader__
print(model.config._attn_implementation)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=process_environment(),
    )
    assert done.stdout.strip() == "fasttps", done.stderr
