"""`fasttps.save` and `fasttps.load`: what comes back, and what a broken folder is."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch

import fasttps
from fasttps.packed_model import MANIFEST, BrokenModel
from fasttps.packed_model.tensor_file import TensorFile, write_tensors
from tests.support.errors import bits
from tests.support.llama import generate, logits, prompt, tiny_llama

FIRST = "fasttps-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model in bfloat16 with a tied head, patched with int8 caches, and its folder."""
    model = tiny_llama(tie_word_embeddings=True, dtype=torch.bfloat16, num_hidden_layers=2)
    patch = fasttps.patch(model, kv="int8")
    folder = tmp_path_factory.mktemp("saved")
    fasttps.save(patch, folder)
    return folder, model


def test_a_loaded_model_says_the_same(saved):
    folder, model = saved
    loaded = fasttps.load(folder)
    assert torch.equal(logits(loaded, prompt(2, 9)), logits(model, prompt(2, 9)))
    caches = [fasttps.StaticKVCache.for_model(each, 21) for each in (model, loaded)]
    ours, theirs = (
        generate(each, prompt(2, 9), cache=cache)
        for each, cache in zip((loaded, model), caches[::-1])
    )
    assert torch.equal(ours, theirs)
    assert {cache.layers[0].keys.dtype for cache in caches} == {torch.int8}
    assert repr(loaded) == repr(model)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert loaded(prompt(1, 3)).logits.dtype == torch.bfloat16  # no gradient is asked for


def test_the_state_is_that_of_the_saved_model(saved):
    folder, model = saved
    ours, theirs = fasttps.load(folder).state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(bits(ours[key]), bits(theirs[key])) for key in theirs)


def test_a_tied_embedding_shares_the_head(saved):
    loaded = fasttps.load(saved[0])
    assert loaded.model.embed_tokens.head is loaded.lm_head
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert FIRST in {file.name for file in saved[0].iterdir()}
    assert "model.embed_tokens.weight" not in TensorFile(saved[0] / FIRST).names


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_models_of_other_shapes(tmp_path, head, dtype):
    model = tiny_llama(head=head, dtype=dtype, attention_bias=True, mlp_bias=True)
    with fasttps.patch(model) as patch:
        fasttps.save(patch, tmp_path)
        theirs = logits(model, prompt(2, 9))
    assert torch.equal(logits(fasttps.load(tmp_path), prompt(2, 9)), theirs)


def test_a_part_that_is_not_patched(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    with fasttps.patch(model, lm_head=False, attention=False):
        fasttps.save(model, tmp_path)
        theirs = logits(model, prompt(2, 9))
    loaded = fasttps.load(tmp_path)
    assert torch.equal(logits(loaded, prompt(2, 9)), theirs)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_rounded_weights_come_back_rounded(tmp_path, weights):
    """And weights that are loaded into them are rounded again."""
    model, other = tiny_llama(0), tiny_llama(1)
    options = {"group_size": 64} if weights == "int4" else {}
    fasttps.save(fasttps.patch(model, weights, lm_head="int8", **options), tmp_path)
    loaded = fasttps.load(tmp_path)
    assert torch.equal(logits(loaded, prompt(2, 9)), logits(model, prompt(2, 9)))
    loaded.load_state_dict(other.state_dict())
    packed = loaded.model.layers[0].self_attn.q_proj.packed_weight
    wanted = {"int8": "INT8_GROUP"}.get(weights, weights.upper())
    assert packed.format.name == wanted
    fasttps.patch(other, weights, lm_head="int8", **options)
    assert torch.equal(logits(loaded, prompt(2, 9)), logits(other, prompt(2, 9)))


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_a_copy_of_a_loaded_model(saved, kind):
    loaded = fasttps.load(saved[0])
    other = copy.deepcopy(loaded) if kind == "deepcopy" else pickle.loads(pickle.dumps(loaded))
    ours = logits(loaded, prompt(1, 9))
    assert torch.equal(logits(other, prompt(1, 9)), ours)
    other.lm_head.weight_packed.zero_()
    assert torch.equal(logits(loaded, prompt(1, 9)), ours)


def test_what_is_written_into_a_loaded_model_is_not_written_to_the_file(saved):
    folder, _ = saved
    before = (folder / FIRST).read_bytes()
    loaded = fasttps.load(folder)
    loaded.lm_head.weight_packed.zero_()
    loaded.model.norm.weight.data.zero_()
    assert (folder / FIRST).read_bytes() == before


def test_the_weights_are_mapped(saved):
    """Each at a multiple of 64 bytes, as the ops want them; a thousand files take no memory."""
    loaded = fasttps.load(saved[0])
    for buffer in loaded.buffers():
        if buffer.dtype == torch.uint8:
            assert buffer.data_ptr() % 64 == 0
            assert buffer.untyped_storage().nbytes() == buffer.nbytes  # nobody else's bytes
    maps = Path("/proc/self/maps").read_text()
    assert str((saved[0] / FIRST).resolve()) in maps


def test_safetensors_reads_the_files(saved):
    from safetensors.torch import load_file

    theirs, ours = load_file(saved[0] / FIRST), TensorFile(saved[0] / FIRST)
    assert {name for name in theirs if not name.startswith("_padding")} == ours.names
    assert all(torch.equal(bits(ours.tensor(name)), bits(theirs[name])) for name in ours.names)


def test_several_files(saved, tmp_path):
    _, model = saved
    seen = []
    fasttps.save(model, tmp_path, max_file_bytes=30_000, progress=lambda *step: seen.append(step))
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and [step[:2] for step in seen] == [
        (at + 1, len(files)) for at in range(len(files))
    ]
    assert torch.equal(logits(fasttps.load(tmp_path), prompt(1, 9)), logits(model, prompt(1, 9)))
    fasttps.save(model, tmp_path)  # fewer files than before: none is left over
    assert [file.name for file in tmp_path.glob("*.safetensors")] == [FIRST]


def test_saving_over_what_is_mapped(saved, tmp_path):
    """The mapped file lives on; to cut it short would kill the process."""
    _, model = saved
    fasttps.save(model, tmp_path)
    loaded = fasttps.load(tmp_path)
    ours = logits(loaded, prompt(1, 9))
    fasttps.save(loaded, tmp_path)
    assert torch.equal(logits(loaded, prompt(1, 9)), ours)
    assert torch.equal(logits(fasttps.load(tmp_path), prompt(1, 9)), ours)
    assert not list(tmp_path.glob(".*")) and not list(tmp_path.glob("*.unfinished"))


def test_the_folder_is_complete(tmp_path):
    """Config, generation config and the tokenizer's files; transformers reads them as usual."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from tests.support.tiny_folder import save_llama

    save_llama(tmp_path / "in")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    words = AutoTokenizer.from_pretrained(tmp_path / "in")
    model.generation_config.temperature, model.generation_config.do_sample = 0.25, True
    patch = fasttps.patch(model)
    fasttps.save(patch, tmp_path / "out")
    fasttps.save(patch, tmp_path / "named", tokenizer=words)
    for name in ("out", "named"):
        assert AutoTokenizer.from_pretrained(tmp_path / name)("hello") == words("hello")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == ["LlamaForCausalLM"] and config.dtype == torch.float32
    loaded = fasttps.load(tmp_path / "out")
    assert loaded.generation_config.temperature == 0.25
    assert loaded.config._attn_implementation == "fasttps"
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


# --- what cannot be saved ---


def test_what_is_not_saved(saved, tmp_path):
    _, model = saved
    with pytest.raises(ValueError, match="model wanted a patched one, got a plain Llama"):
        fasttps.save(tiny_llama(), tmp_path)
    with pytest.raises(TypeError, match="model wanted a patched model, got str"):
        fasttps.save("model", tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"folder wanted one without a model, got .*safetensors"):
        fasttps.save(model, tmp_path)
    with pytest.raises(ValueError, match="folder wanted a folder, got the file"):
        fasttps.save(model, tmp_path / "model.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors"]


def test_a_failed_save_leaves_the_model_that_was_there(saved, tmp_path):
    _, model = saved
    folder = tmp_path / "with space"

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fasttps.save(model, folder, progress=fail)
    assert list(folder.iterdir()) == []
    fasttps.save(model, folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    other = tiny_llama(1)
    fasttps.patch(other)

    class Unwritable:
        save_pretrained = fail

    with pytest.raises(KeyboardInterrupt):
        fasttps.save(other, folder, progress=fail)
    with pytest.raises(KeyboardInterrupt):
        fasttps.save(other, folder, tokenizer=Unwritable())
    other.model.norm.weight.data = other.model.norm.weight.data.double()
    with pytest.raises(ValueError, match=r"wanted float32.*model\.norm\.weight is torch.float64"):
        fasttps.save(other, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    fasttps.load(folder)


def test_a_save_that_was_cut_off_while_files_took_their_place_is_no_model(
    saved, tmp_path, monkeypatch
):
    _, model = saved
    fasttps.save(model, tmp_path)
    replace = os.replace

    def interrupted(old, new):
        if new == tmp_path / MANIFEST:
            raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fasttps.save(model, tmp_path)
    monkeypatch.undo()
    with pytest.raises(BrokenModel, match=f"has no {MANIFEST}"):
        fasttps.load(tmp_path)
    (tmp_path / ".unfinished").mkdir()  # what a process leaves that is killed
    fasttps.save(model, tmp_path)
    fasttps.load(tmp_path)


def test_tensors_of_every_kind_come_back(tmp_path):
    tensors = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "bf16": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "int": torch.arange(3),
        "strided": torch.randn(4, 6).t(),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    file = TensorFile(tmp_path / "x.safetensors")
    assert file.names == tensors.keys()
    for name, tensor in tensors.items():
        ours = file.tensor(name)
        assert torch.equal(ours, tensor) and ours.dtype == tensor.dtype
        assert ours.data_ptr() % 64 == 0
