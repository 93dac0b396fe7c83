"""`fasttps bench`: limits, ops and a whole model on this machine, in a minute or two."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fasttps
from fasttps.bench import Ruler, selection
from fasttps.bench.case import judged, show
from fasttps.bench.machine import machine
from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.load import Loaded, load, source
from fasttps.cli.patched import check_isa, check_supported, patch_model
from fasttps.cli.progress import Reporter
from fasttps.packed_model.manifest import is_packed_model

FILE_WIDTH = 140  # columns of a table that goes into a file


def run(model: Path | None, quick: bool, threads: int | None, file: Path | None) -> None:
    """Measure, show the tables on standard output, append the records to `file`.

    Raises:
        CliError: the model cannot be read or patched, or `file` cannot be written; or, when all is
            shown and written, something ran faster than the limits. Quick runs only say so: their
            few samples of a busy machine prove nothing.
    """
    check_isa()
    if file is not None:
        _append(file, [])
    if model is not None:
        source(model)
        if is_packed_model(model):
            raise CliError(
                ExitCode.USAGE,
                f"--model {model} is packed, and there is nothing to compare it with; "
                "give the model that it was made from",
            )
        check_supported(model)
    if threads is not None:
        torch.set_num_threads(threads)
    out, reporter = Console(highlight=False, soft_wrap=True), Reporter()
    if not out.is_terminal:
        out.width = FILE_WIDTH
    with reporter.step("measuring limits"):
        limits = list(selection.limit_records(quick))
    table = Table("limit", "threads", "", title="what this machine can do at most")
    for record in limits:
        value = f"{record['value']:,.1f} {record['unit']}"
        table.add_row(record["limit"], str(record["threads"]), value)
    out.print(table)
    ops, ruler = [], Ruler(quick=quick)
    with reporter.step("measuring ops"), torch.inference_mode():
        for case in selection.op_cases(quick):
            ops.append(judged(case.shape.split()[0], case, ruler, rounds=5 if quick else 15))
            del case
    show("ops", ops, out)
    models = [_model(model, quick, reporter)] if model or _has_transformers(reporter) else []
    for record in models:
        out.print(_model_table(record))
    facts = {
        "machine": machine(),
        "isa": fasttps.isa.active(),
        "bf16_product": fasttps.isa.bf16_product(),
        "threads": torch.get_num_threads(),
        "fasttps": fasttps.__version__,
        "torch": str(torch.__version__),
    }
    out.print(
        f"{facts['machine']} · isa {facts['isa']} · {facts['threads']} threads · "
        f"fasttps {facts['fasttps']} · torch {facts['torch']}",
        markup=False,
    )
    if file is not None:
        _append(file, [facts | record for record in (*limits, *ops, *models)])
    wrong = [record["broken_ruler"] for record in (*ops, *models) if "broken_ruler" in record]
    if wrong and not quick:
        raise CliError(ExitCode.UNEXPECTED, "; ".join(wrong))
    for text in wrong:
        reporter.line(text)


def _has_transformers(reporter: Reporter) -> bool:
    if importlib.util.find_spec("transformers") is not None:
        return True
    reporter.line("no whole model: transformers is not installed; pip install 'fasttps[hf]'")
    return False


def _model(path: Path | None, quick: bool, reporter: Reporter) -> dict[str, Any]:
    if path is None:
        name = "random, smollm2-135m shape"
        with reporter.step("making a model"):
            plain = selection.random_llama(quick)
    else:
        name = path.name
        plain = load(path, torch.bfloat16, reporter).model
    with reporter.step("copying the model"):
        patched = copy.deepcopy(plain)
    patch_model(Loaded(patched, tokenizer=None), reporter)
    prompt_tokens, new_tokens = (32, 8) if quick else (256, 64)
    with reporter.step("both models answer, in turn"):
        return selection.model_record(
            name,
            plain,
            patched,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            quick=quick,
        )


def _model_table(record: dict[str, Any]) -> Table:
    title = f"{record['model']}: {record['prompt_tokens']} tokens, then {record['new_tokens']}"
    table = Table("", "prefill tok/s", "decode tok/s", "of read", title=title)
    for way in (selection.OURS, selection.TRANSFORMERS):
        table.add_row(
            way,
            f"{record[f'{way}_prefill_tokens_per_s']:,.1f}",
            f"{record[f'{way}_decode_tokens_per_s']:,.1f}",
            f"{record[f'{way}_share_of_read_bandwidth']:.0%}",
        )
    ratios = (f"{record[f'{part}_over_transformers']:.2f} x" for part in ("prefill", "decode"))
    table.add_row("ratio", *ratios, "")
    return table


def _append(file: Path, records: list[dict[str, Any]]) -> None:
    try:
        with file.open("a") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise CliError(ExitCode.USAGE, f"--json {file}: {error.strerror}") from error
