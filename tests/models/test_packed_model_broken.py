"""Saved models whose files are broken, hostile or of another version: errors that say so."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import fasttps
from fasttps.packed_model import MANIFEST, BrokenModel
from fasttps.packed_model.tensor_file import BrokenTensorFile, TensorFile, write_tensors
from tests.support.llama import tiny_llama

FIRST = "fasttps-00001-of-00001.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = tiny_llama(tie_word_embeddings=True, dtype=torch.bfloat16, num_hidden_layers=2)
    folder = tmp_path_factory.mktemp("saved")
    fasttps.save(fasttps.patch(model), folder)
    return folder


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of the folder, to be broken."""
    return shutil.copytree(saved, tmp_path / "broken")


def edited(folder, edit):
    """The folder, its manifest passed through `edit`."""
    manifest = json.loads((folder / MANIFEST).read_text())
    edit(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def rewritten(folder, edit):
    """The folder, its tensors passed through `edit`."""
    file = TensorFile(folder / FIRST)
    tensors = {name: file.tensor(name) for name in sorted(file.names)}
    edit(tensors)
    write_tensors(folder / FIRST, tensors)
    return folder


def change(key, value):
    return lambda manifest: manifest.__setitem__(key, value)


def change_module(name, **fields):
    return lambda manifest: manifest["modules"][name].update(fields)


def change_buffer(**fields):
    def edit(manifest):
        manifest["modules"][Q_PROJ]["buffers"]["weight_packed"].update(fields)

    return edit


MANIFESTS = {
    "another version": (change("format", 2), "wanted format 1, got 2: .*another version"),
    "another layout": (change("packed_layout", 9), "wanted packed_layout .*, got 9"),
    "no version": (change("format", None), "wanted format of type int, got None"),
    "bool for int": (change("format", True), "wanted format of type int, got True"),
    "a file outside": (change("files", ["../x.safetensors"]), "wanted names of files in this"),
    "no file": (change("files", []), "wanted names of files in this"),
    "a missing file": (
        change("files", ["fasttps-00009-of-00009.safetensors"]),
        "lacks fasttps-00009",
    ),
    "modules a list": (change("modules", []), "wanted modules of type dict"),
    "another module": (change("model", {"module": "os", "class": "x"}), "wanted a model of"),
    "another class": (
        change("model", {"module": "transformers.models.llama.modeling_llama", "class": "nn"}),
        "wanted a model, got",
    ),
    "kv": (change("kv", "int3"), "wanted kv of .*got 'int3'"),
    "unknown class": (change_module(Q_PROJ, **{"class": "Linear"}), "wanted a class for Linear"),
    "class of another": (
        change_module(Q_PROJ, **{"class": "FusedLlamaMLP"}),
        "wanted a class for Linear model",
    ),
    "no buffers": (change_module(Q_PROJ, buffers={}), "the buffers \\[\\]"),
    "buffers a list": (change_module(Q_PROJ, buffers=[]), "wanted buffers of type dict"),
    "no head": (change_module("model.embed_tokens", head=None), "wanted the head"),
    "another head": (change_module("model.embed_tokens", head=Q_PROJ), "wanted the head"),
    "head of none": (change_module("model.embed_tokens", head="x"), "has not"),
    "a module of none": (
        lambda manifest: manifest["modules"].update(x=manifest["modules"][Q_PROJ]),
        "names a module that the model has not",
    ),
    "a format": (change_buffer(format="INT3"), "unknown format 'INT3'"),
    "another format": (change_buffer(format="F32"), "does not fit the bytes of"),
    "a group size": (change_buffer(group_size=32), "does not fit the bytes of"),
    "rows": (change_buffer(rows=64), "64 rows and 48 cols, the model has"),
    "huge rows": (change_buffer(rows=2**62), "rows and 48 cols, the model has"),
    "rows a string": (change_buffer(rows="48"), "wanted rows of type int, got '48'"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_makes_no_sense(broken, case):
    edit, message = MANIFESTS[case]
    with pytest.raises(BrokenModel, match=message):
        fasttps.load(edited(broken, edit))


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_a_manifest_that_is_no_json_object(broken, text):
    (broken / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(BrokenModel, match=MANIFEST):
        fasttps.load(broken)


TENSORS = {
    "one missing": (lambda tensors: tensors.pop(f"{Q_PROJ}.weight_packed"), "lacks the tensor"),
    "a norm missing": (lambda tensors: tensors.pop("model.norm.weight"), "lacks the tensor model"),
    "one too many": (lambda tensors: tensors.update(x=torch.zeros(3)), "no place for"),
    "another shape": (
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}),
        r"model\.norm\.weight of the shape \[47\]",
    ),
    "another type": (
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int64)}),
        "torch.int64",
    ),
    "bytes missing": (
        lambda tensors: tensors.update(
            {f"{Q_PROJ}.weight_packed": tensors[f"{Q_PROJ}.weight_packed"][:-1].clone()}
        ),
        "does not fit the bytes",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(broken, case):
    edit, message = TENSORS[case]
    with pytest.raises(BrokenModel, match=message):
        fasttps.load(rewritten(broken, edit))


def test_a_config_that_makes_no_model(broken):
    file = broken / "config.json"
    config = json.loads(file.read_text())
    for changes, message in (
        ({"num_hidden_layers": 2_000_000_000}, "states 2000000000 layers"),
        ({"num_hidden_layers": 3}, "lacks"),
        ({"hidden_size": 96}, "the model has"),
        ({"model_type": "gpt2"}, "has the config of a gpt2|makes no model"),
        ({"num_attention_heads": "x"}, "makes no model"),
        ({"dtype": "int8"}, "dtype|makes no model"),
    ):
        file.write_text(json.dumps(config | changes))
        with pytest.raises(BrokenModel, match=message):
            fasttps.load(broken)
    file.unlink()
    with pytest.raises(BrokenModel, match="makes no model"):
        fasttps.load(broken)


def header(text):
    return len(text).to_bytes(8, "little") + text


HEADERS = {
    "empty": (b"", "has 0 bytes"),
    "cut in the length": (b"\x01\x00", "has 2 bytes"),
    "a length beyond the file": ((2**63).to_bytes(8, "little") + b"{}", "states a header of"),
    "no JSON": (header(b"{"), "no JSON"),
    "deep JSON": (header(b"[" * 100_000), "no JSON"),
    "a list": (header(b"[]"), "no JSON object"),
    "an entry that is none": (header(b'{"a": 3}'), "by no JSON object"),
    "a type": (
        header(b'{"a": {"dtype": "F8", "shape": [], "data_offsets": [0, 1]}}'),
        "unknown type",
    ),
    "a type that is none": (
        header(b'{"a": {"dtype": [], "shape": [], "data_offsets": [0, 1]}}'),
        "unknown type",
    ),
    "a negative size": (
        header(b'{"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}'),
        "the shape",
    ),
    "past the end": (
        header(b'{"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}') + b"12345678",
        "at bytes 0 to 9 of 8",
    ),
    "offsets that wrap": (
        header(b'{"a": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 0]}}'),
        "at bytes 0 to 0",
    ),
    "overlapping": (
        header(
            b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},'
            b'"b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}'
        )
        + b"12345678",
        "overlap: a and b",
    ),
    "backwards": (
        header(b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [8, 0]}}') + b"12345678",
        "at bytes 8 to 0",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_file_that_is_no_safetensors_file(broken, case):
    data, message = HEADERS[case]
    (broken / FIRST).write_bytes(data)
    with pytest.raises(BrokenModel, match=message):
        fasttps.load(broken)
    with pytest.raises(BrokenTensorFile, match=message):
        TensorFile(broken / FIRST)


def test_a_file_that_is_cut_short(broken):
    data = (broken / FIRST).read_bytes()
    for length in (len(data) - 64, len(data) // 2, 100):
        (broken / FIRST).write_bytes(data[:length])
        with pytest.raises(BrokenModel, match=FIRST):
            fasttps.load(broken)
