"""How fast a GGUF file is loaded, ready to answer, beside `dd` of the same file.

A file of a Llama's shape is made of random blocks, some gigabytes of them, and loaded from a cold
cache by processes of their own: its pages are dropped before each. `dd` reads it as often, between
them, so that a disk that changes touches both. Imports are not counted, for a process has them
anyway; the tokenizer is. Nor is it counted what a virtual machine's host takes to find memory that
it had taken back, which is a second a gigabyte: as much as the model and the file's pages need is
touched and freed before. `--model smollm2` loads the real model that the demo runs, whole
vocabulary and all.

    python benchmarks/bench_load_gguf.py --json load_gguf.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

GB = 10**9
AIM = 0.8  # of dd's rate
MOST_MEMORY = 0.8  # of what is free
# Offset of the scales in a block, so that no value is absurd.
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 8192


def main() -> None:
    import harness
    from rich.console import Console
    from rich.table import Table

    options = harness.parser(__doc__ or "")
    options.add_argument("--types", nargs="+", choices=SCALES, default=["Q4_0", "Q8_0", "Q4_K"])
    options.add_argument("--gb", type=float, help="size of the file (4; 0.2 with --quick)")
    options.add_argument("--folder", type=Path, help="where the file is made (that of temp files)")
    options.add_argument("--model", choices=["random", "smollm2"], default="random")
    options.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.load:
        load(asked.load, asked.threads)
        return
    rounds = asked.rounds or (1 if asked.quick else 5)
    records = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for kind in asked.types if asked.model == "random" else ["Q4_1"]:
            if asked.model == "random":
                path = Path(folder) / "model.gguf"
                write(path, kind, (asked.gb or (0.2 if asked.quick else 4)) * GB)
            else:
                from fasttps.cli.demo import smollm2_path

                path = smollm2_path()
            records.append(compare(path, kind, rounds, asked.threads))
            records[-1] |= {"model": asked.model, **harness.environment()}
    table = Table(title="GGUF files, cold cache, medians")
    for head in ("blocks", "GB", "load s", "load GB/s", "dd GB/s", "of dd's rate"):
        table.add_column(head, justify="right")
    for record in records:
        table.add_row(
            record["blocks"],
            f"{record['file_bytes'] / GB:.2f}",
            f"{record['load_s']:.2f}",
            f"{record['load_gb_per_s']:.2f}",
            f"{record['dd_gb_per_s']:.2f}",
            f"{record['of_dd']:.2f}" + ("" if record["met"] else f" (aim {AIM})"),
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    harness.write_json(asked.json, records)


def compare(path: Path, kind: str, rounds: int, threads: int | None) -> dict[str, Any]:
    """Load a file and `dd` it, turn by turn; seconds of each are medians."""
    loads: list[tuple[float, float]] = []
    reads = []
    for _ in range(rounds):
        drop(path)
        reads.append(dd(path))
        command = [sys.executable, __file__, "--load", str(path)]
        if threads:
            command += ["--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"bench_load_gguf: the process that loads failed\n{done.stderr}")
        loads.append(tuple(json.loads(done.stdout.splitlines()[-1])))
    size = path.stat().st_size
    load_s, cpu_s = (statistics.median(times) for times in zip(*loads))
    dd_s = statistics.median(reads)
    return {
        "benchmark": "load_gguf",
        "blocks": kind,
        "file_bytes": size,
        "rounds": rounds,
        "load_s": round(load_s, 4),
        "load_cpu_s": round(cpu_s, 4),  # of all threads, the system's share too
        "dd_s": round(dd_s, 4),
        "load_gb_per_s": round(size / load_s / GB, 3),
        "dd_gb_per_s": round(size / dd_s / GB, 3),
        "of_dd": round(dd_s / load_s, 3),
        "met": dd_s / load_s >= AIM,
    }


def load(path: Path, threads: int | None) -> None:
    """Print the seconds that loading takes in this process, its imports made."""
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    import fasttps
    import fasttps.gguf.pack
    import fasttps.gguf.tokenizer
    import fasttps.models.llama
    from fasttps.memory import empty_in_huge_pages

    if threads:
        torch.set_num_threads(threads)
    needed = min(2 * path.stat().st_size, MOST_MEMORY * os.sysconf("SC_AVPHYS_PAGES") * 4096)
    memory = empty_in_huge_pages((int(needed),), torch.uint8).fill_(1)
    del memory
    drop(path)
    before, begin = os.times(), time.perf_counter()
    fasttps.load_gguf(path)
    taken, after = time.perf_counter() - begin, os.times()
    print(json.dumps([taken, after.user + after.system - before.user - before.system]))


def dd(path: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(
        ["dd", f"if={path}", "of=/dev/null", "bs=4M"], check=True, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - begin


def drop(path: Path) -> None:
    """Let the system forget the file's pages; those of a file that was just written go first."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write(path: Path, kind: str, size: float) -> None:
    """A Llama of so many layers as the size allows; all have the same random blocks."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    elements, block_bytes = gguf.GGML_QUANT_SIZES[number]
    shapes = {
        "attn_q": (HEADS * HEAD_DIM, WIDTH),
        "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_output": (WIDTH, HEADS * HEAD_DIM),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    weights = sum(rows * cols for rows, cols in shapes.values())
    layers = max(1, round(size / (weights // elements * block_bytes)))
    rng = np.random.default_rng(0)

    def blocks(rows: int, cols: int) -> np.ndarray[Any, Any]:
        made = rng.integers(0, 256, (rows, cols // elements, block_bytes), dtype=np.uint8)
        for at in SCALES[kind]:
            scale = np.full((*made.shape[:2], 1), 1e-3, dtype=np.float16)
            made[:, :, at : at + 2] = scale.view(np.uint8)
        return made.reshape(rows, -1)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["t", "1", *(f"t{at}" for at in range(VOCAB - 2))])
    writer.add_token_merges(["t 1"])
    layer = {name: blocks(*shape) for name, shape in shapes.items()}
    writer.add_tensor("token_embd.weight", blocks(VOCAB, WIDTH), raw_dtype=number)
    for at in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{at}.{norm}.weight", np.ones(WIDTH, dtype=np.float32))
        for name, data in layer.items():
            writer.add_tensor(f"blk.{at}.{name}.weight", data, raw_dtype=number)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
