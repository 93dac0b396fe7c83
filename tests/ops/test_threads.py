"""Thread counts: the same result with any, also while they change and after a fork."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fasttps import ops
from tests.ops.test_gate_up_silu_mlp import mlp_arguments, weights_of
from tests.support.attention import attention_inputs, randn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def thread_count():
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def long_decode(device):
    """One sequence of one KV head, so that the cache is split over the threads."""
    return device.arguments(
        attention_inputs(
            batch=1, num_kv_heads=1, past=3000, max_seq_len=3001, rotary_dim=64, unused=0.0
        )
    )


def mlp(device):
    weights, _ = weights_of(130, 300, torch.float32)
    return device.arguments(mlp_arguments(randn(5, 3, 130), weights))


def calls(device):
    prompt = attention_inputs(new_tokens=150, past=20, max_seq_len=170, rotary_dim=64, unused=0.0)
    return {
        "rope_attention_decode": long_decode(device),
        "causal_prefill": device.arguments(prompt),
        "gate_up_silu_mlp": mlp(device),
    }


@pytest.mark.parametrize("op", ["rope_attention_decode", "causal_prefill", "gate_up_silu_mlp"])
def test_any_number_of_threads(device, thread_count, op):
    """The split of a long cache moves roundings of float32 and nothing else."""
    arguments = calls(device)[op]
    torch.set_num_threads(1)
    expected = device.call(op, **arguments)
    for threads in (2, 3, 4, 8, 2):
        torch.set_num_threads(threads)
        out = device.call(op, **arguments)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
        assert torch.equal(device.call(op, **arguments), out), "not the same twice"


def test_packing_does_not_depend_on_threads(device, thread_count):
    """One layout, whatever packs it: a file written with 8 threads is read with 1."""
    weight = device.tensor(randn(0, 300, 70))
    packed = []
    for threads in (1, 2, 8):
        torch.set_num_threads(threads)
        packed.append(device.call("pack_weight", weight=weight, format=ops.PackedFormat.F32))
    assert torch.equal(packed[0], packed[1]) and torch.equal(packed[0], packed[2])


def test_thread_count_that_changes_while_another_thread_decodes(device, thread_count):
    """Scratch sized for one number of threads and a loop run with another overflow the heap."""
    arguments = long_decode(device)
    expected = device.call("rope_attention_decode", **arguments)
    stop = threading.Event()
    flips, failures = [], []

    def flip():
        while not stop.is_set():
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                flips.append(threads)

    def decode():
        try:
            for step in range(60):
                # Where a thread has its own setting, the change is made here.
                torch.set_num_threads((1, 2, 4)[step % 3])
                out = device.call("rope_attention_decode", **arguments)
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=flip), threading.Thread(target=decode)]
    for thread in threads:
        thread.start()
    threads[1].join()
    stop.set()
    threads[0].join()
    assert not failures, failures[0]
    assert len(flips) > 3


def test_two_threads_decode_at_once(device):
    """Nothing is shared between calls: each thread gets what it gets alone."""
    work = [
        device.arguments(
            attention_inputs(seed=seed, past=[700, 90], max_seq_len=800, rotary_dim=64, unused=0.0)
        )
        for seed in range(3)
    ]
    alone = [device.call("rope_attention_decode", **arguments) for arguments in work]
    results = [[] for _ in work]

    def decode(index):
        for _ in range(20):
            results[index].append(device.call("rope_attention_decode", **work[index]))

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, outs in zip(alone, results):
        assert len(outs) == 20
        for out in outs:
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)


FORK = """
import os, sys, torch
import fasttps
from fasttps import ops
from tests.support.attention import attention_inputs

def decode():
    inputs = attention_inputs(
        batch=1, num_kv_heads=1, past=3000, max_seq_len=3001, rotary_dim=64, unused=0.0)
    return ops.rope_attention_decode(**inputs)

torch.set_num_threads(2)
expected = decode()
child = os.fork()
if child == 0:
    # The OpenMP threads of the parent are not there: torch's rule for a fork is one thread.
    torch.set_num_threads(1)
    os._exit(0 if torch.allclose(decode(), expected, rtol=1e-5, atol=2e-6) else 3)
_, status = os.waitpid(child, 0)
torch.testing.assert_close(decode(), expected)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_decodes_after_a_fork():
    result = subprocess.run(
        [sys.executable, "-c", FORK],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'python'}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
