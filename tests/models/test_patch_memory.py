"""A patched model takes no more memory than an unpatched one, and does not take more and more."""

from __future__ import annotations

import gc
import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fasttps
from fasttps.models.obstacles import return_freed_memory
from tests.support.command import process_environment
from tests.support.llama import LAYERS, generate, logits, prompt, tiny_llama

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
MAX_RATIO = 1.05


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def bytes_in_use():
    """Resident, after the C library has given back what is free in its heap."""
    gc.collect()
    return_freed_memory()
    return resident_bytes()


def test_peak_memory_is_that_of_the_unpatched_model(tmp_path):
    """SmolLM2-135M's shape in bfloat16, each in a process of its own: peak up to 8 tokens.

    By the peak of the process, and by what it has above Python, torch and transformers; but for
    the largest weight, which is there twice while it is packed.
    """
    file = tmp_path / "memory.jsonl"
    command = [sys.executable, ROOT / "benchmarks" / "bench_memory.py", "--json", file]
    subprocess.run(command, check=True, env=process_environment(), capture_output=True)
    record = json.loads(file.read_text())
    print(record)
    assert record["dtype"] == "bfloat16"
    assert record["unpatched_peak_bytes"] > 500 * MIB
    head_bytes = 49152 * 576 * 2
    for before in (0, record["unpatched_before_bytes"]):
        limit = MAX_RATIO * (record["unpatched_peak_bytes"] - before) + head_bytes
        assert record["patched_peak_bytes"] - before <= limit


def big_llama():
    """MLPs of 3 * 8 MiB in float32, so that a weight kept beside its packed form shows."""
    return tiny_llama(hidden_size=1024, intermediate_size=2048, num_attention_heads=8)


def test_originals_are_not_kept_beside_the_packed_weights():
    """Repacked weights beside mapped originals took 1.9 times the file elsewhere."""
    model = big_llama()
    mlp_bytes = sum(p.nbytes for layer in model.model.layers for p in layer.mlp.parameters())
    assert mlp_bytes == 72 * MIB
    logits(model, prompt(1, 3))
    gc.collect()
    before = resident_bytes()
    patch = fasttps.patch(model)
    logits(model, prompt(1, 3))
    gc.collect()
    during = resident_bytes()
    assert sum(p.nbytes for layer in model.model.layers for p in layer.mlp.parameters()) == 0
    patch.undo()
    logits(model, prompt(1, 3))
    gc.collect()
    after = resident_bytes()
    assert during - before < 0.1 * mlp_bytes
    assert after - before < 0.1 * mlp_bytes


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantising_streams(weights):
    """Never more than the model was and one slot; each weight's memory goes as it is packed."""
    model, seen = big_llama(), []
    logits(model, prompt(1, 3))
    before = bytes_in_use()
    slot_bytes = 2 * 8 * MIB  # gate and up in float32
    fasttps.patch(model, weights, progress=lambda *step: seen.append(resident_bytes()))
    assert max(seen) - before < slot_bytes
    weight_bytes = LAYERS * 34 * MIB  # 10 of the attention, 24 of the MLP, and a small head
    assert before - bytes_in_use() > {"int8": 0.7, "int4": 0.8}[weights] * weight_bytes


def test_the_footprint_counts_packed_weights_once():
    model = tiny_llama(vocab_size=112, hidden_size=64, intermediate_size=96)
    before = model.get_memory_footprint()
    with fasttps.patch(model):
        assert model.get_memory_footprint() == before


def test_patching_and_freeing_models_leaves_nothing():
    def one():
        model = big_llama()
        patch = fasttps.patch(model)
        logits(model, prompt(1, 3))
        patch.undo()

    one()
    before = bytes_in_use()
    for _ in range(3):
        one()
    assert bytes_in_use() - before < 24 * MIB  # one model has over 100


@pytest.mark.parametrize("cache", ["dynamic", "static_kv_cache"])
def test_distinct_prompt_lengths_leave_nothing(cache):
    """A cache of kernels keyed by length grew with every new prompt elsewhere."""
    model = tiny_llama()
    with fasttps.patch(model):
        held = fasttps.StaticKVCache(model.config, 400) if cache != "dynamic" else None

        def ask(length):
            if held is not None:
                held.reset()
            logits(model, prompt(1, length), cache=held)

        for length in range(300, 330):
            ask(length)
        before = bytes_in_use()
        for length in range(1, 160):
            ask(length)
        assert bytes_in_use() - before < 4 * MIB


def test_generating_leaves_nothing():
    model = tiny_llama()
    with fasttps.patch(model), torch.no_grad():
        for _ in range(3):
            generate(model, prompt(1, 9), cache=fasttps.StaticKVCache(model.config, 2048))
        before = bytes_in_use()
        for seed in range(20):
            cache = fasttps.StaticKVCache(model.config, 2048)
            generate(model, prompt(1, 9, seed), cache=cache, max_new_tokens=3, min_new_tokens=3)
        assert bytes_in_use() - before < 4 * MIB
