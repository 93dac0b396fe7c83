"""Peak memory of a whole model, patched and unpatched, each in a process of its own.

The peak is the kernel's VmHWM of a process that makes the model, patches it or not, and generates
a few tokens; what it had before it made the model (Python, torch, transformers) is shown beside
it. The model's own memory is what its peak has above that.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20
STEPS = ("before", "model", "patched", "peak")


def status_bytes(key: str) -> int:
    """A line of /proc/self/status, such as VmHWM (the peak so far) or VmRSS (now)."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {key}"
    return 1024 * int(found[1])


def measure(chosen: argparse.Namespace) -> dict[str, int]:
    """Bytes of this process: before the model, with it, patched, and at its highest."""
    import models
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    import fasttps
    import fasttps.models.llama

    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    steps = {"before": status_bytes("VmRSS")}
    model = models.make(chosen.model, chosen.shape, models.DTYPES[chosen.dtype])
    steps["model"] = status_bytes("VmRSS")
    if chosen.measure == "patched":
        fasttps.patch(model)
    steps["patched"] = status_bytes("VmRSS")
    prompt = torch.arange(1, 1 + chosen.prompt_tokens)[None]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
    if chosen.measure == "patched":
        room = chosen.prompt_tokens + chosen.new_tokens
        options["past_key_values"] = fasttps.StaticKVCache(model.config, room)
    count = chosen.new_tokens
    model.generate(prompt, max_new_tokens=count, min_new_tokens=count, **options)
    return steps | {"peak": status_bytes("VmHWM")}


def main() -> None:
    import harness
    import models

    options = harness.parser(__doc__ or "")
    models.add_options(options)
    options.add_argument("--prompt-tokens", type=int, default=64, help="(64)")
    options.add_argument("--new-tokens", type=int, default=8, help="(8)")
    options.add_argument("--measure", choices=["patched", "unpatched"], help=argparse.SUPPRESS)
    chosen = options.parse_args()
    chosen.shape = chosen.shape or "smollm2-135m"
    if chosen.measure:
        print(json.dumps(measure(chosen)))
        return

    from rich.console import Console
    from rich.table import Table

    running = {}
    for kind in ("unpatched", "patched"):  # at the same time: each has its own memory
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", kind]
        pipe = subprocess.PIPE
        running[kind] = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    ended = {kind: process.communicate() for kind, process in running.items()}
    taken = {}
    for kind, (out, error) in ended.items():
        if running[kind].returncode != 0:
            sys.exit(f"bench_memory: the {kind} process failed\n{error}")
        taken[kind] = json.loads(out.splitlines()[-1])
    own = {kind: steps["peak"] - steps["before"] for kind, steps in taken.items()}
    record = {
        "benchmark": "memory",
        "model": models.name_of(chosen.model, chosen.shape),
        "dtype": chosen.dtype,
        **{f"{kind}_{at}_bytes": steps[at] for kind, steps in taken.items() for at in STEPS},
        "peak_ratio": round(taken["patched"]["peak"] / taken["unpatched"]["peak"], 4),
        "own_peak_ratio": round(own["patched"] / own["unpatched"], 4),
        **harness.environment(),
    }
    table = Table(title=f"{record['model']}, {record['dtype']}: resident MiB")
    for head in ("", "before", "with model", "patched", "peak", "peak of the model alone"):
        table.add_column(head, justify="right")
    for kind, steps in taken.items():
        values = [*(steps[at] for at in STEPS), own[kind]]
        table.add_row(kind, *(f"{value / MIB:,.0f}" for value in values))
    ratios = (record["peak_ratio"], record["own_peak_ratio"])
    table.add_row("ratio", "", "", "", *(f"{ratio:.3f}" for ratio in ratios))
    Console().print(table)
    harness.write_json(chosen.json, [record])


if __name__ == "__main__":
    main()
