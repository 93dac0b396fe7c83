"""`fasttps quantize`: a model with its weights packed, into a folder that loads in a second."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fasttps
from fasttps.cli.errors import CliError, ExitCode
from fasttps.cli.load import Loaded, is_checkpoint, load, read, source
from fasttps.cli.patched import check_isa, check_supported
from fasttps.cli.progress import Reporter
from fasttps.packed_model.manifest import is_packed_model
from fasttps.packed_model.mapped import MappedModel
from fasttps.packed_model.skeleton import cast
from fasttps.packed_model.writing import check_folder, save

GB = 1e9


@dataclass(frozen=True)
class Request:
    """The options of one run, as given."""

    model: Path
    folder: Path
    weights: str | None
    group_size: int | None
    lm_head: str | None
    kv: str | None
    int8_activation: bool | None
    dtype: str


def run(request: Request) -> None:
    """Pack and save the model; where and how large it is goes to standard error.

    Raises:
        CliError: what `ExitCode` lists.
    """
    begin = time.perf_counter()
    where = source(request.model)
    _usage(lambda: check_folder(request.folder))
    if is_packed_model(request.model):
        raise CliError(ExitCode.USAGE, f"{request.model} is packed already")
    check_isa()
    check_supported(request.model)
    reporter = Reporter()
    dtype = getattr(torch, request.dtype)
    mapped = None
    if request.model.is_dir() and not is_checkpoint(request.model):
        mapped = read(request.model, lambda: MappedModel(request.model))
    if mapped is None or mapped.model is None:
        mapped = None
        loaded = load(
            request.model,
            dtype,
            reporter,
            # The bits of a GGUF file or a checkpoint stay, unless others are asked for.
            pack=request.weights is None and request.lm_head is None,
            kv=request.kv,
            int8_activation=request.int8_activation is not False,
        )
    else:
        import transformers

        tokenizer = read(request.model, lambda: transformers.AutoTokenizer.from_pretrained(**where))
        loaded = Loaded(mapped.model, tokenizer)
    if loaded.patch is not None and request.group_size is not None:
        raise CliError(ExitCode.USAGE, "--group-size needs --weights int8 or int4")
    patch = loaded.patch or _patch(loaded.model, request, mapped, reporter)
    cast(loaded.model, dtype)
    with reporter.step("writing") as report:
        try:
            save(patch, request.folder, tokenizer=loaded.tokenizer, progress=report)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CliError(
                ExitCode.UNEXPECTED, f"cannot write {request.folder}: {reason}"
            ) from error
    size = sum(file.stat().st_size for file in request.folder.glob("*.safetensors"))
    reporter.line(f"{request.folder}: {size / GB:.2f} GB in {time.perf_counter() - begin:.1f} s")


def _patch(
    model: Any, request: Request, mapped: MappedModel | None, reporter: Reporter
) -> fasttps.Patch:
    with reporter.step("packing the weights") as report:

        def progress(done: int, total: int, name: str) -> None:
            if mapped is not None:
                mapped.forget()
            report(done, total, name)

        try:
            return _usage(
                lambda: fasttps.patch(
                    model,
                    request.weights,
                    group_size=request.group_size,
                    lm_head=request.lm_head or True,
                    kv=request.kv,
                    int8_activation=request.int8_activation,
                    progress=progress,
                )
            )
        except fasttps.PatchError as error:
            raise CliError(ExitCode.UNSUPPORTED_MODEL, str(error)) from error


def _usage(call: Any) -> Any:
    """What `call` returns; a wrong argument of it is one of the command's."""
    try:
        return call()
    except ValueError as error:
        raise CliError(ExitCode.USAGE, str(error)) from error
