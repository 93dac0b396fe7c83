"""What people do with a model besides `generate`, after a patch: adapters, hooks, threads, ..."""

from __future__ import annotations

import threading

import pytest
import torch

import fasttps
from tests.support.families import FAMILIES, each_family
from tests.support.llama import VOCAB, generate, left_padded, logits, prompt, tiny_llama

ATOL_F32 = 5e-4


@each_family
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_attentions_of_every_layer(family, cache):
    """`output_attentions` goes the long way, which keeps them."""
    plain, model = family.model(), family.model()
    inputs = left_padded(prompt(2, 11), [0, 4])
    fasttps.patch(model)
    options = {"cache": fasttps.StaticKVCache(model.config, 11)} if cache == "static" else {}
    with torch.no_grad():
        theirs = plain(**inputs, output_attentions=True).attentions
        ours = model(**inputs, output_attentions=True, **options).attentions
    assert len(ours) == len(theirs) > 0
    shown = inputs["attention_mask"].bool()
    for one, other in zip(ours, theirs):
        assert one.shape == other.shape
        rows = shown[:, None, :, None].expand_as(one)  # a query of padding has no right answer
        torch.testing.assert_close(one[rows], other[rows], rtol=0, atol=1e-4)


def test_two_threads_generate_at_once():
    """Each with a cache of its own, on one patched model."""
    model = tiny_llama()
    fasttps.patch(model)
    prompts = [prompt(2, 5 + seed, seed=seed) for seed in range(4)]
    wanted = [generate(model, ids, max_new_tokens=40, min_new_tokens=40) for ids in prompts]
    got: list[list[torch.Tensor]] = [[] for _ in prompts]

    def run(at):
        torch.set_num_threads(1)
        for _ in range(5):
            cache = fasttps.StaticKVCache(model.config, 64)
            options = {"max_new_tokens": 40, "min_new_tokens": 40}
            got[at].append(generate(model, prompts[at], cache=cache, **options))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tokens, others in zip(wanted, got):
        assert len(others) == 5 and all(torch.equal(tokens, other) for other in others)


def adapted(model, *names):
    """With LoRA on some projections, whose weights are not zero."""
    import peft

    names = names or ("q_proj", "v_proj", "down_proj")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(names), init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("name", ["llama3.1", "qwen3"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_lora_adapter_is_not_ignored(name, kind):
    """Projections that it wraps stay its own, and the report says so."""
    plain, model = (adapted(FAMILIES[name].model()) for _ in range(2))
    without = generate(FAMILIES[name].model(), prompt(2, 9))
    wanted = generate(plain, prompt(2, 9))
    assert not torch.equal(wanted, without)
    report = fasttps.patch(model).report()
    skipped = {entry.name.rpartition(".")[2]: entry.reason for entry in report.skipped}
    assert skipped.keys() >= {"q_proj", "v_proj", "mlp"}
    assert "is a peft.tuners.lora.layer.Linear, not a Linear" in skipped["q_proj"]
    cache = {"cache": fasttps.StaticKVCache(model.config, 21)} if kind == "static" else {}
    assert torch.equal(generate(model, prompt(2, 9), **cache), wanted)


def test_a_merged_adapter_is_packed_with_the_rest():
    model = adapted(tiny_llama())
    wanted = generate(model, prompt(2, 9))
    merged = model.merge_and_unload()
    assert not fasttps.patch(merged).report().skipped
    assert torch.equal(generate(merged, prompt(2, 9)), wanted)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_an_adapter_that_comes_after_the_patch_is_heeded(kind):
    wanted = generate(adapted(tiny_llama(), "q_proj", "v_proj"), prompt(2, 9))
    model = tiny_llama()
    fasttps.patch(model)
    generate(model, prompt(2, 9), cache=fasttps.StaticKVCache(model.config, 21))
    model = adapted(model, "q_proj", "v_proj")
    cache = {"cache": fasttps.StaticKVCache(model.config, 21)} if kind == "static" else {}
    assert torch.equal(generate(model, prompt(2, 9), **cache), wanted)


def test_an_adapter_of_a_fused_mlp_is_refused():
    model = tiny_llama()
    fasttps.patch(model)
    with pytest.raises(RuntimeError, match="down_proj is fused and would not run; undo the patch"):
        adapted(model, "down_proj")


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_accelerate(when):
    """They move tensors about: a module that has one before the patch stays as it is."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    calls = []

    class Count(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(type(module).__name__)
            return args, kwargs

    plain, model = tiny_llama(), tiny_llama()
    wanted = generate(plain, prompt(1, 9))
    if when == "after":
        fasttps.patch(model)
    for layer in model.model.layers:
        add_hook_to_module(layer.mlp, Count())
    if when == "before":
        skipped = fasttps.patch(model).report().skipped
        assert [entry.name.rpartition(".")[2] for entry in skipped] == ["mlp"] * 3
        assert all("accelerate hook" in str(entry.reason) for entry in skipped)
    cache = fasttps.StaticKVCache(model.config, 21)
    assert torch.equal(generate(model, prompt(1, 9), cache=cache), wanted)
    assert len(calls) == 3 * 12


def test_a_pipeline(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")
    texts = ["w5 w6 w7", "w9"]
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    plain, model = tiny_llama(), tiny_llama()
    said = []
    for one in (plain, model):
        if one is model:
            fasttps.patch(model)
        run = pipeline("text-generation", model=one, tokenizer=tokenizer, device="cpu")
        said.append(run(texts, batch_size=2, **options))
    assert said[0] == said[1]


@each_family
def test_hidden_states_of_every_layer(family):
    plain, model = family.model(), family.model()
    fasttps.patch(model)
    cache = fasttps.StaticKVCache(model.config, 9)
    with torch.no_grad():
        theirs = plain(prompt(2, 9), output_hidden_states=True).hidden_states
        ours = model(prompt(2, 9), output_hidden_states=True, cache=cache).hidden_states
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=0, atol=ATOL_F32)
    assert logits(model, prompt(2, 9)).shape == (2, 9, VOCAB)
