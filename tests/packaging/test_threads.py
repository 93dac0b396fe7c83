"""One OpenMP runtime in the process, torch's own, and the ops really run on its threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

# Threads are counted in a process of its own: OpenMP starts them at the first parallel loop.
PROBE = """
import json, os, sys
import torch, fasttps

threads = int(sys.argv[1])
torch.set_num_threads(threads)
before = len(os.listdir("/proc/self/task"))
cache = torch.zeros(1, 8, 4096, 64)
query = torch.zeros(1, 1, 8, 64)
fasttps.ops.rope_attention_decode(query, None, None, cache, cache.clone(), torch.tensor(4096))
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(json.dumps({
    "started": len(os.listdir("/proc/self/task")) - before,
    "runtimes": sorted(p for p in maps if any(n in p for n in ("libgomp", "libomp", "libiomp"))),
}))
"""


def probe(threads: int) -> dict:
    command = [sys.executable, "-c", PROBE, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_one_openmp_runtime_is_loaded():
    (runtime,) = probe(2)["runtimes"]
    torch_folder = Path(torch.__file__).resolve().parent
    assert Path(runtime).resolve().is_relative_to(torch_folder.parent)


def test_set_num_threads_is_obeyed():
    # A second runtime would not know of it; a library built without -fopenmp would start none.
    assert probe(1)["started"] == 0
    assert probe(2)["started"] == 1
