"""Checkpoints of other schemes, and broken ones: one line that says which, or what."""

from __future__ import annotations

import json
import struct

import pytest
import torch

import fasttps
from fasttps.checkpoint import BrokenCheckpoint, UnsupportedCheckpoint, is_quantized
from tests.support.checkpoints import FILE, copy_of, edit_config, edit_scheme, edit_tensors, fixture

Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def refused(folder, kind, *words):
    with pytest.raises(kind) as caught:
        fasttps.load_checkpoint(folder)
    assert caught.type is kind
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


# The scheme that a config states, and what the error names.
UNSUPPORTED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
    "hqq": ({"quant_method": "hqq", "bits": 4}, "hqq"),
    "aqlm": ({"quant_method": "aqlm"}, "aqlm"),
    "quanto": ({"quant_method": "quanto", "weights": "int4"}, "quanto"),
    "torchao": ({"quant_method": "torchao"}, "torchao"),
    "mxfp4": ({"quant_method": "mxfp4"}, "mxfp4"),
    "no_method": ({"bits": 4}, "None"),
    "awq_gemv": ({"quant_method": "awq", "version": "gemv", "bits": 4}, "gemv"),
    "awq_marlin": ({"quant_method": "awq", "version": "marlin", "bits": 4}, "marlin"),
    "awq_3": ({"quant_method": "awq", "version": "gemm", "bits": 3}, "3 bits"),
    "gptq_3": ({"quant_method": "gptq", "bits": 3}, "3 bits"),
    "gptq_2": ({"quant_method": "gptq", "bits": 2}, "2 bits"),
    "gptq_marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
    "gptq_is_marlin": ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin"),
    "gptq_int16": ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "int16"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_says_which_scheme_is_not_read(tmp_path, name):
    scheme, word = UNSUPPORTED[name]
    folder = copy_of("awq", tmp_path)
    edit_config(folder, lambda config: config.update(quantization_config=scheme))
    refused(folder, UnsupportedCheckpoint, word)
    with pytest.raises(UnsupportedCheckpoint, match=word):
        fasttps.load(folder)


def group(**changes):
    """A config group of compressed-tensors."""
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
    weights |= {key: value for key, value in changes.items() if key in weights}
    others = {key: value for key, value in changes.items() if key not in weights}
    return {"config_groups": {"a": {"targets": ["Linear"], "weights": weights, **others}}}


ACTIVATIONS = {"type": "int", "num_bits": 8, "strategy": "tensor", "dynamic": False}
COMPRESSED = {
    "fp8": (group(type="float", num_bits=8, format="float-quantized"), "float-quantized"),
    "nvfp4": (group(type="float", format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
    "marlin_24": ({"format": "marlin-24", **group()}, "marlin-24"),
    "dense": ({"format": "dense", **group()}, "dense"),
    "int3": (group(num_bits=3), "3 bits"),
    "block": (group(strategy="block"), "block"),
    "static_activations": (group(input_activations=ACTIVATIONS), "activations"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    "quantised_cache": ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    "rotated": ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_says_what_of_compressed_tensors_is_not_read(tmp_path, name):
    changes, word = COMPRESSED[name]
    refused(edit_scheme(copy_of("ct-int4", tmp_path), **changes), UnsupportedCheckpoint, word)


def test_int8_activations_that_come_as_they_are_met_are_taken(tmp_path):
    activations = {**ACTIVATIONS, "strategy": "token", "dynamic": True}
    folder = edit_scheme(copy_of("ct-int4", tmp_path), **group(input_activations=activations))
    assert fasttps.load_checkpoint(folder).patch is not None


@pytest.mark.parametrize(
    "groups",
    [
        {"config_groups": {}},
        {"config_groups": [1]},
        {"config_groups": {"a": 3}},
        {"config_groups": {"a": {"weights": None}}},
        group(targets=3),
        group(targets=[3]),
        group(targets=["re:("]),
        group(targets=["re:.*nothing"]),
        group(group_size=None),
        group(group_size=32),
        {"format": None, **group(num_bits=8)},
    ],
)
def test_a_config_of_compressed_tensors_that_makes_no_sense(tmp_path, groups):
    with pytest.raises((BrokenCheckpoint, UnsupportedCheckpoint)) as caught:
        fasttps.load_checkpoint(edit_scheme(copy_of("ct-int4", tmp_path), **groups))
    assert "\n" not in str(caught.value)


def drop(name):
    return lambda tensors: tensors.pop(name)


def cut(name, dim=0):
    return lambda t: t.update({name: t[name].narrow(dim, 0, t[name].shape[dim] - 1)})


def cast(name, dtype):
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def put(name, values):
    return lambda tensors: tensors.update({name: values})


BROKEN = {
    "no_zeros": ("awq", drop(f"{Q_PROJ}.qzeros"), f"{Q_PROJ}.qzeros"),
    "no_scales": ("gptq-v2", drop(f"{Q_PROJ}.scales"), f"{Q_PROJ}.scales"),
    "no_quants": ("gptq-v2", drop(f"{Q_PROJ}.qweight"), Q_PROJ),
    "no_norm": ("awq", drop("model.norm.weight"), "model.norm.weight"),
    "no_embedding": ("awq", drop("model.embed_tokens.weight"), "embed_tokens"),
    "no_packed": ("ct-int4", drop(f"{DOWN}.weight_packed"), f"{DOWN}.weight"),
    "no_int8": ("ct-int8-channel", drop(f"{DOWN}.weight"), f"{DOWN}.weight"),
    "fewer_rows": ("awq", cut(f"{DOWN}.qweight", 1), f"{DOWN}.qweight"),
    "fewer_cols": ("awq", cut(f"{DOWN}.qweight"), f"{DOWN}.qweight"),
    "fewer_gptq_cols": ("gptq-v2", cut(f"{DOWN}.qweight"), DOWN),
    "fewer_groups": ("gptq-v2", cut(f"{DOWN}.scales"), DOWN),
    "flat_quants": ("gptq-v2", put(f"{DOWN}.qweight", torch.zeros(8).int()), DOWN),
    "fewer_zeros": ("gptq-v2", cut(f"{DOWN}.qzeros"), DOWN),
    "shorter_g_idx": ("gptq-v2", cut(f"{DOWN}.g_idx"), f"{DOWN}.g_idx"),
    "negative_g_idx": ("gptq-v2", put(f"{DOWN}.g_idx", -torch.ones(256).int()), "g_idx"),
    "g_idx_past_the_groups": ("gptq-v2", put(f"{DOWN}.g_idx", torch.arange(256).int()), "g_idx"),
    "float_quants": ("awq", cast(f"{DOWN}.qweight", torch.float32), f"{DOWN}.qweight"),
    "integer_scales": ("awq", cast(f"{DOWN}.scales", torch.int32), f"{DOWN}.scales"),
    "float_int8": ("ct-int8-channel", cast(f"{DOWN}.weight", torch.float16), f"{DOWN}.weight"),
    "another_shape": ("ct-int4", put(f"{DOWN}.weight_shape", torch.tensor([256, 128])), DOWN),
    "narrow_norm": ("awq", cut("model.norm.weight"), "model.norm.weight"),
    "integer_norm": ("awq", cast("model.norm.weight", torch.int64), "model.norm.weight"),
    "a_tensor_too_many": ("awq", put("model.extra.weight", torch.zeros(3)), "model.extra.weight"),
    "a_linear_too_many": ("awq", put("model.extra.qweight", torch.zeros(3).int()), "model.extra"),
    "a_bias_too_long": ("awq", put(f"{DOWN}.bias", torch.ones(3)), f"{DOWN}.bias"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_says_what_is_broken(tmp_path, name):
    of, edit, word = BROKEN[name]
    folder = edit_tensors(copy_of(of, tmp_path), edit)
    with pytest.raises((BrokenCheckpoint, UnsupportedCheckpoint), match=word.replace(".", r"\.")):
        fasttps.load_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1000, -1])
def test_a_file_that_is_cut_short(tmp_path, keep):
    folder = copy_of("awq", tmp_path)
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:keep])
    refused(folder, BrokenCheckpoint, FILE)


@pytest.mark.parametrize("length", [2**63, 2**40, 0])
def test_a_header_of_any_length(tmp_path, length):
    folder = copy_of("awq", tmp_path)
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(struct.pack("<Q", length) + data[8:])
    refused(folder, BrokenCheckpoint, FILE)


@pytest.mark.parametrize("offsets", [[0, 2**62], [2**62, 2**63], [-8, 8], [0, 8]])
def test_offsets_past_the_end(tmp_path, offsets):
    folder = copy_of("awq", tmp_path)
    data = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header[f"{Q_PROJ}.qweight"]["data_offsets"] = offsets
    text = json.dumps(header).encode()
    rest = data[8 + length :]
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + rest)
    refused(folder, BrokenCheckpoint, FILE)


def test_a_folder_without_safetensors(tmp_path):
    folder = copy_of("awq", tmp_path)
    (folder / FILE).unlink()
    refused(folder, UnsupportedCheckpoint, "safetensors")


@pytest.mark.parametrize(
    "places", [None, 3, {"a": [3]}, {"a": "../model.safetensors"}, {"a": "/m"}]
)
def test_an_index_that_makes_no_sense(tmp_path, places):
    folder = copy_of("awq", tmp_path)
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": places}))
    refused(folder, BrokenCheckpoint, "index.json")


def test_a_shard_that_is_missing(tmp_path):
    """As of a folder whose download was interrupted."""
    folder = edit_tensors(
        copy_of("awq", tmp_path),
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name],
    )
    refused(folder, BrokenCheckpoint, "layers.1")


@pytest.mark.parametrize(
    "edit",
    [
        lambda config: config.update(num_hidden_layers=2**31),
        lambda config: config.update(hidden_size=-1),
        lambda config: config.update(hidden_size="many"),
        lambda config: config.update(model_type="nonsense"),
        lambda config: config.update(quantization_config=[4]),
        lambda config: config["quantization_config"].update(group_size="128"),
    ],
    ids=["layers", "negative", "text", "type", "list", "group"],
)
def test_a_config_that_makes_no_sense(tmp_path, edit):
    refused(edit_config(copy_of("awq", tmp_path), edit), BrokenCheckpoint)


def test_a_config_that_is_no_json(tmp_path):
    folder = copy_of("awq", tmp_path)
    (folder / "config.json").write_text("{")
    refused(folder, BrokenCheckpoint, "config.json")


def test_a_model_that_is_no_causal_lm(tmp_path):
    bert = lambda config: config.update(model_type="wav2vec2")  # noqa: E731
    refused(edit_config(copy_of("awq", tmp_path), bert), UnsupportedCheckpoint, "wav2vec2")


def test_quantised_experts(tmp_path):
    name = "model.layers.0.mlp.experts.0.up_proj"
    folder = edit_tensors(copy_of("awq", tmp_path), put(f"{name}.qweight", torch.zeros(3).int()))
    refused(folder, UnsupportedCheckpoint, "experts", name)


def test_a_quantised_head_that_is_tied(tmp_path):
    folder = edit_tensors(
        copy_of("gptq-sym", tmp_path),
        lambda tensors: [
            tensors.update({f"lm_head.{part}": tensors[f"{Q_PROJ}.{part}"]})
            for part in ("qweight", "qzeros", "scales")
        ],
    )
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    refused(folder, UnsupportedCheckpoint, "lm_head.weight")


def test_a_plain_folder_is_not_quantised(tmp_path):
    folder = edit_config(copy_of("awq", tmp_path), lambda config: config.pop("quantization_config"))
    assert not is_quantized(folder) and is_quantized(fixture("awq"))
    refused(folder, UnsupportedCheckpoint, "config.json")


@pytest.mark.parametrize(
    "name, of", [("quantize_config.json", "gptq-sym"), ("quant_config.json", "awq")]
)
def test_older_folders_have_the_scheme_in_a_file_of_its_own(tmp_path, name, of):
    folder = copy_of(of, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    scheme = config.pop("quantization_config")
    scheme.pop("quant_method")
    if of == "awq":  # as AutoAWQ called them
        scheme = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / name).write_text(json.dumps(scheme))
    made, plain = (fasttps.load_checkpoint(path, pack=False) for path in (folder, fixture(of)))
    for key, value in plain.model.state_dict().items():
        assert torch.equal(made.model.state_dict()[key], value)


def test_the_folder_has_changed_when_the_patch_is_undone(tmp_path):
    folder = copy_of("awq", tmp_path)
    made = fasttps.load_checkpoint(folder)
    edit_tensors(folder, drop(f"{Q_PROJ}.scales"))
    with pytest.raises(fasttps.PatchError, match="scales"):
        made.patch.undo()
    assert made.model.model.layers[0].self_attn.q_proj.packed_weight is not None
