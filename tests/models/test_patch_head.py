"""The head over packed weights, and an embedding that is tied to it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fasttps
from fasttps.models.packed_linear import PackedEmbedding, PackedLinear
from tests.support.errors import bits
from tests.support.llama import FUSED_MODULES, generate, logits, prompt, tiny_llama

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tied_llama(seed=0, **changes):
    return tiny_llama(seed, tie_word_embeddings=True, **changes)


def head_of(model):
    return model.lm_head, model.model.embed_tokens


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_embedding_reads_the_packed_head(dtype):
    model = tied_llama(dtype=dtype)
    head, embedding = head_of(model)
    weight, before = head.weight, bits(head.weight).clone()
    rows = embedding(prompt(2, 9)).detach()
    tokens = generate(model, prompt(2, 9))
    with fasttps.patch(model) as patch:
        assert len(patch.report().fused) == FUSED_MODULES + 1
        assert type(head) is PackedLinear and type(embedding) is PackedEmbedding
        assert "model.embed_tokens (Embedding) -> packed_embedding" in str(patch.report())
        assert list(embedding.buffers()) == []  # shared, not copied
        assert head.weight is weight is embedding.weight and weight.numel() == 0
        with torch.no_grad():
            assert torch.equal(embedding(prompt(2, 9)), rows)
        if dtype == torch.float32:
            assert torch.equal(generate(model, prompt(2, 9)), tokens)
    assert type(head) is nn.Linear and type(embedding) is nn.Embedding
    assert head.weight is weight is embedding.weight
    assert torch.equal(bits(weight), before)
    assert torch.equal(generate(model, prompt(2, 9)), tokens)


def test_an_untied_embedding_stays_as_it_is():
    model = tiny_llama()
    head, embedding = head_of(model)
    with fasttps.patch(model):
        assert type(embedding) is nn.Embedding and embedding.weight.numel() > 0
        assert head.weight.numel() == 0


@pytest.mark.parametrize("tied", [True, False])
def test_without_the_head(tied):
    model = tied_llama() if tied else tiny_llama()
    theirs = logits(model, prompt(2, 9))
    with fasttps.patch(model, lm_head=False) as patch:
        assert [entry.name for entry in patch.report().skipped] == ["lm_head"]
        assert type(model.lm_head) is nn.Linear and model.lm_head.weight.numel() > 0
        torch.testing.assert_close(logits(model, prompt(2, 9)), theirs, rtol=0, atol=2e-4)


def test_the_state_of_a_tied_model_holds_the_weight_once():
    model = tied_llama()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with fasttps.patch(model):
        for _ in range(2):
            state = model.state_dict()
            assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
            assert list(state) == list(before)
            assert all(torch.equal(state[key], before[key]) for key in before)
        state["lm_head.weight"].zero_()
        again = model.state_dict()
        assert torch.equal(again["lm_head.weight"], before["lm_head.weight"])
        assert torch.equal(model.lm_head.state_dict()["weight"], before["lm_head.weight"])


@pytest.mark.parametrize("assign", [False, True])
def test_a_tied_model_loads_weights(assign):
    model, other, plain = tied_llama(0), tied_llama(1), tied_llama(0)
    state = other.state_dict()
    plain.load_state_dict(state, assign=assign)
    with fasttps.patch(model):
        model.load_state_dict(state, assign=assign)
        ours = logits(model, prompt(2, 9))
        torch.testing.assert_close(ours, logits(other, prompt(2, 9)), rtol=0, atol=2e-4)
    assert torch.equal(logits(model, prompt(2, 9)), logits(plain, prompt(2, 9)))
    tied = [m.lm_head.weight is m.model.embed_tokens.weight for m in (model, plain)]
    assert tied[0] == tied[1]


def test_a_tied_model_in_another_dtype():
    model, other = tied_llama(), tied_llama().to(torch.bfloat16)
    with fasttps.patch(model):
        model.to(torch.bfloat16)
        head, embedding = head_of(model)
        assert head.weight is embedding.weight and head.weight.numel() == 0
        assert logits(model, prompt(1, 3)).dtype == torch.bfloat16
    assert torch.equal(logits(model, prompt(2, 9)), logits(other, prompt(2, 9)))


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_a_copy_of_a_tied_model_is_tied_to_its_own_head(kind):
    model = tied_llama()
    with fasttps.patch(model):
        ours = logits(model, prompt(1, 9))
        other = copy.deepcopy(model) if kind == "deepcopy" else pickle.loads(pickle.dumps(model))
        assert other.model.embed_tokens.head is other.lm_head is not model.lm_head
        assert torch.equal(logits(other, prompt(1, 9)), ours)
        other.lm_head.weight_packed.zero_()
        assert torch.equal(logits(other, prompt(1, 9)), torch.zeros_like(ours))
        assert torch.equal(logits(model, prompt(1, 9)), ours)


def test_an_embedding_that_is_more_than_one():
    model = tied_llama()
    model.model.embed_tokens.max_norm = 1.0
    with fasttps.patch(model) as patch:
        (skipped,) = patch.report().skipped
    assert skipped.name == "lm_head"
    assert skipped.reason == "its weight is that of model.embed_tokens, which has a max_norm"


def test_a_weight_of_three_modules_is_not_packed():
    model = tied_llama()
    model.extra = nn.Linear(48, 97, bias=False).eval()
    model.extra.weight = model.lm_head.weight
    with fasttps.patch(model) as patch:
        (skipped,) = patch.report().skipped
    assert (skipped.name, skipped.reason) == ("lm_head", "weight: is shared with another module")


@pytest.mark.parametrize("tied", [True, False])
def test_resizing_the_embeddings_is_refused(tied):
    """It would take the weights to be empty, having changed half of the model."""
    model = tied_llama() if tied else tiny_llama()
    theirs = logits(model, prompt(1, 9))
    with fasttps.patch(model):
        with pytest.raises(RuntimeError, match=r"resize_token_embeddings.*undo the patch first"):
            model.resize_token_embeddings(101)
        torch.testing.assert_close(logits(model, prompt(1, 9)), theirs, rtol=0, atol=2e-4)
    model.resize_token_embeddings(101)
    assert logits(model, prompt(1, 3)).shape[-1] == 101


def test_a_hook_on_a_packed_linear_fires():
    model, seen = tied_llama(), []
    for module in (model.lm_head, model.model.embed_tokens, model.model.layers[0].self_attn.q_proj):
        module.register_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    with fasttps.patch(model):
        logits(model, prompt(1, 3))
    assert seen == ["PackedEmbedding", "PackedLinear", "PackedLinear"]


def test_a_weight_that_is_assigned_is_not_ignored():
    model = tiny_llama()
    for linear in (model.lm_head, model.model.layers[0].self_attn.k_proj):
        with fasttps.patch(model):
            linear.weight = nn.Parameter(torch.ones(linear.out_features, linear.in_features))
            with pytest.raises(RuntimeError, match="PackedLinear: has a weight that came after"):
                logits(model, prompt(1, 3))
        assert torch.equal(linear.weight, torch.ones_like(linear.weight))


def test_what_is_packed_is_within_reach():
    """As a whole-token op takes it: the tensor, its format, group size, rows, cols and bias."""
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    layer = model.model.layers[1]
    weights = {name: layer.self_attn.get_submodule(name).weight.clone() for name in ("q_proj",)}
    with fasttps.patch(model):
        q = layer.self_attn.q_proj.packed_weight
        assert (q.format, q.group_size, q.rows, q.cols) == (fasttps.ops.PackedFormat.F32, 0, 48, 48)
        assert q.bias is layer.self_attn.q_proj.bias and not q.int8_activation
        assert torch.equal(
            fasttps.ops.unpack_weight(q.packed, format=q.format, rows=q.rows, cols=q.cols),
            weights["q_proj"],
        )
        gate_up, down = layer.mlp.packed_gate_up, layer.mlp.packed_down
        assert (gate_up.rows, gate_up.cols, down.rows, down.cols) == (88, 48, 48, 88)
        assert gate_up.bias == (layer.mlp.gate_proj.bias, layer.mlp.up_proj.bias)
        assert down.bias is layer.mlp.down_proj.bias and layer.mlp.function == "silu"
        model.double()
        assert layer.self_attn.q_proj.packed_weight is layer.mlp.packed_down is None
